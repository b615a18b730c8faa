// How a block of attention over latents divides its shared memory, and where things lie in it.
#pragma once
#include "warpgroup.cuh"

// KD, VD: elements of a cache row and of the latent it begins with, which is key and value. NT: groups of eight query heads.
// WIDE: products of warpgroups, whose operands stay in shared memory, cut into panels.
template <int KD_, int VD_, int NT_, int TILE_, int STAGES_, int WARPS_, bool WIDE_>
struct LatentsRoom {
  static constexpr int KD = KD_, VD = VD_, NT = NT_, TILE = TILE_, STAGES = STAGES_, WARPS = WARPS_;
  static constexpr bool WIDE = WIDE_;
  static constexpr int THREADS = WARPS * 32;
  static constexpr int COLS = NT * 8;
  static constexpr int HEADS = COLS / WARPS;                 // queries a warp makes
  static constexpr int K_ROW = KD * 2 + (WIDE ? 0 : 16);     // bytes; 16 of padding against bank conflicts
  static constexpr int STAGE = TILE * K_ROW;
  static constexpr int GROUP = KD / PANEL_ELEMENTS * PANEL_GROUP;  // WIDE: bytes of eight slots, panel after panel
  static constexpr int P_ROW = TILE * 2 + (WIDE ? 0 : 16);
  static constexpr int S_STRIDE = TILE + 4;                  // floats
  static constexpr int GROUPS = TILE / 16, K_PARTS = WARPS / GROUPS;
  static constexpr int K_STEPS = KD / 16 / K_PARTS, K_PAIRS = (K_STEPS + 1) / 2;
  static constexpr int V_TILES = VD / 16 / WARPS;            // WIDE: of 64 values by four warps; else of 16 by one
  static constexpr int S_BYTES = K_PARTS * COLS * S_STRIDE * 4, P_BYTES = COLS * P_ROW;
  static constexpr int WORK_BYTES = S_BYTES + P_BYTES;
  static constexpr int OFF_Q = STAGES * STAGE;
  static constexpr int OFF_WORK = OFF_Q + COLS * K_ROW;
  static constexpr int OFF_P = WIDE ? OFF_WORK : OFF_WORK + S_BYTES;  // panels begin at multiples of 1,024
  static constexpr int OFF_S = WIDE ? OFF_WORK + P_BYTES : OFF_WORK;
  static constexpr int OFF_ALPHA = OFF_WORK + WORK_BYTES;
  static constexpr int OFF_FOLDS = OFF_ALPHA + COLS * 4;
  static constexpr int OFF_NEWEST = OFF_FOLDS + COLS * 8;
  static constexpr int NEWEST = KD * 2;
  static constexpr int OFF_ARRIVALS = OFF_NEWEST + NEWEST;   // WIDE: a barrier a stage
  static constexpr int SMEM = OFF_ARRIVALS + (WIDE ? STAGES * 8 : 0);
  static_assert(GROUPS * K_PARTS == WARPS && K_STEPS * K_PARTS * 16 == KD && V_TILES * WARPS * 16 == VD, "shape");
  static_assert(!WIDE || (TILE == 64 && WARPS == 8 && OFF_Q % 1024 == 0 && OFF_P % 1024 == 0), "panels");
  static_assert(STAGE % 16 == 0 && OFF_P % 16 == 0 && OFF_NEWEST % 16 == 0 && SMEM <= 227 * 1024, "shared memory");

  u8* smem;

  DEVICE u8* stage(int number) const { return smem + number * STAGE; }
  DEVICE u8* queries() const { return smem + OFF_Q; }
  DEVICE u8* probabilities() const { return smem + OFF_P; }
  DEVICE float* scores(int part) const { return reinterpret_cast<float*>(smem + OFF_S) + part * COLS * S_STRIDE; }
  DEVICE float* alpha() const { return reinterpret_cast<float*>(smem + OFF_ALPHA); }
  DEVICE float* folds() const { return reinterpret_cast<float*>(smem + OFF_FOLDS); }  // (COLS, 2): kept, taken
  DEVICE u8* newest() const { return smem + OFF_NEWEST; }
  DEVICE BulkArrival arrival(int stage) const { return BulkArrival{reinterpret_cast<u64*>(smem + OFF_ARRIVALS) + stage}; }

  // Where 16 bytes of a tile's slot, of a query and of a head's probabilities lie.
  DEVICE u8* slot_piece(int number, int slot, int piece) const {
    u8* rows = stage(number);
    if (WIDE) return rows + slot / 8 * GROUP + piece / 8 * PANEL_GROUP + panel_piece(slot % 8, piece % 8);
    return rows + slot * K_ROW + piece * 16;
  }
  DEVICE u8* query_piece(int h, int piece) const {
    u8* rows = queries();
    return WIDE ? rows + piece / 8 * (COLS * PANEL_ROW) + panel_piece(h, piece % 8) : rows + h * K_ROW + piece * 16;
  }
  DEVICE u16* probability(int h, int slot) const {
    u8* rows = probabilities();
    u8* piece = WIDE ? rows + panel_piece(h, slot / 8) : rows + h * P_ROW + slot / 8 * 16;
    return reinterpret_cast<u16*>(piece) + slot % 8;
  }
  // What ordinary stores wrote is there for warpgroup products; before a block_sync.
  static DEVICE void publish() {
    if (WIDE) bulk_fence();
  }
};
