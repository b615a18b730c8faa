// Queries of attention over keys and values, and the token's own slot, as a block makes them of the projections.
#pragma once
#include "heads_room.cuh"
#include "slot_share.cuh"

template <class Room>
struct HeadsQueries {
  static constexpr int D = Room::D, WARPS = Room::WARPS, HEADS = Room::HEADS, LANE = Room::LANE;

  Room room;
  i64 token;
  int head0, heads_here;

  // Queries of this block's heads to shared memory; in place of heads that are not there, the last one again, which nobody
  // takes. Found ready: q (tokens, heads, D).
  DEVICE void copy(const u16* q, int heads) const {
    for (int i = threadIdx.x; i < Room::COLS * (D / 8); i += Room::THREADS)
      reinterpret_cast<uint4*>(room.query(i / (D / 8)))[i % (D / 8)] =
          load16(q + (token * heads + head0 + min_int(i / (D / 8), heads_here - 1)) * D + i % (D / 8) * 8);
  }
  // Or normed and rotated here: a warp's heads go side by side, and loads of all are issued before the first is used.
  DEVICE void make(const GqaInput& input) const {
    const int warp = threadIdx.x / 32;
    const LaneTurn<LANE> turn(input.rope, token);
    LanePart<LANE> parts[HEADS], weight{};
    if (input.q_norm != nullptr) weight.load(input.q_norm);
#pragma unroll
    for (int n = 0; n < HEADS; ++n)
      parts[n].load(input.vector(token, head0 + min_int(warp + n * WARPS, heads_here - 1)));
    float x[HEADS][LANE];
#pragma unroll
    for (int n = 0; n < HEADS; ++n) parts[n].unpack(x[n]);
    if (input.q_norm != nullptr)
#pragma unroll
      for (int n = 0; n < HEADS; ++n) norm_part(x[n], weight, input.eps);
#pragma unroll
    for (int n = 0; n < HEADS; ++n) turn.turn(x[n]);
#pragma unroll
    for (int n = 0; n < HEADS; ++n) LanePart<LANE>::store(room.query(warp + n * WARPS), x[n]);
  }
};

// What the warp that makes the token's own slot needs: loaded with the queries, used when its tile is there.
template <class Room>
struct HeadsNewest {
  static constexpr int LANE = Room::LANE;

  LanePart<LANE> key, value, weight;

  DEVICE void load(const AttentionParams& p, i64 token, int kv_head) {
    key.load(p.gqa.vector(token, p.heads + kv_head));
    value.load(p.gqa.vector(token, p.heads + p.kv_heads + kv_head));
    if (p.gqa.k_norm != nullptr) weight.load(p.gqa.k_norm);
  }
  // Into its tile, around which copies have arrived, `at` slots from the tile's start; and to the cache: cached_key,
  // cached_value, or null where another block writes them.
  DEVICE void put(const GqaInput& input, i64 token, const Room& room, int stage, int at, u8* cached_key,
                  u8* cached_value) const {
    const LaneTurn<LANE> turn(input.rope, token);
    float x[LANE], v[LANE];
    key.unpack(x);
    value.unpack(v);
    if (input.k_norm != nullptr) norm_part(x, weight, input.eps);
    turn.turn(x);
    LanePart<LANE>::store(reinterpret_cast<u16*>(room.key_row(stage, at)), x);
    LanePart<LANE>::store(reinterpret_cast<u16*>(room.value_row(stage, at)), v);
    if (cached_key == nullptr) return;
    LanePart<LANE>::store(reinterpret_cast<u16*>(cached_key), x);
    LanePart<LANE>::store(reinterpret_cast<u16*>(cached_value), v);
  }
};
