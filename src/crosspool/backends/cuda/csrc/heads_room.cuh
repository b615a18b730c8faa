// How a block of attention over keys and values divides its shared memory, and where things lie in it.
#pragma once
#include "common.cuh"

// D: elements of a key and of a value. NT: groups of eight query heads.
template <int D_, int NT_, int STAGES_>
struct HeadsRoom {
  static constexpr int D = D_, NT = NT_, STAGES = STAGES_;
  static constexpr int WARPS = 4, THREADS = WARPS * 32, TILE = 64, OWN = TILE / WARPS;  // OWN: a warp's slots of a tile
  static constexpr int COLS = NT * 8, HEADS = COLS / WARPS;  // queries a warp makes
  static constexpr int ROW = D * 2 + 16;                     // bytes; 16 of padding against bank conflicts
  static constexpr int STAGE = 2 * TILE * ROW;               // keys, then values
  static constexpr int STEPS = D / 16, LANE = D / 32;        // LANE: elements of a vector a lane holds
  static constexpr int OFF_Q = STAGES * STAGE, OFF_ML = OFF_Q + COLS * ROW;
  static constexpr int SMEM = OFF_ML + WARPS * COLS * 8;
  static constexpr int MERGE_ROW = D + 4;                    // floats of a head while warps merge, in place of a tile
  static_assert(WARPS * COLS * MERGE_ROW * 4 <= STAGE && SMEM <= 227 * 1024, "shared memory");

  u8* smem;

  static DEVICE int first_own() { return static_cast<int>(threadIdx.x) / 32 * OWN; }
  DEVICE u8* key_row(int stage, int slot) const { return smem + stage * STAGE + slot * ROW; }
  DEVICE u8* value_row(int stage, int slot) const { return key_row(stage, TILE + slot); }
  DEVICE u16* query(int h) const { return reinterpret_cast<u16*>(smem + OFF_Q + h * ROW); }
  DEVICE float* merged(int stage) const { return reinterpret_cast<float*>(smem + stage * STAGE); }  // (WARPS, COLS, MERGE_ROW)
  DEVICE float* merged_ml() const { return reinterpret_cast<float*>(smem + OFF_ML); }               // (WARPS, COLS, 2)
};
