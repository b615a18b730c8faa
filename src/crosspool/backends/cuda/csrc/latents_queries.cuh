// Queries of attention over latents, and the token's own slot, as a block makes them of the projections.
#pragma once
#include "latents_room.cuh"
#include "slot_share.cuh"

template <class Room>
struct LatentsQueries {
  static constexpr int KD = Room::KD, VD = Room::VD, WARPS = Room::WARPS, THREADS = Room::THREADS, HEADS = Room::HEADS;
  static constexpr int ROPE_LANE = (KD - VD) / 32;  // elements of a rope part a lane holds
  static_assert(ROPE_LANE == 2, "a lane's pair");

  const AttentionParams& p;
  Room room;
  i64 token;
  int head0, heads_here;

  // Queries of this block's heads to shared memory; in place of heads that are not there, the last one again, which nobody
  // takes. Found ready:
  DEVICE void copy() const {
    for (int i = threadIdx.x; i < Room::COLS * (KD / 8); i += THREADS)
      *reinterpret_cast<uint4*>(room.query_piece(i / (KD / 8), i % (KD / 8))) =
          load16(p.q + (token * p.heads + head0 + min_int(i / (KD / 8), heads_here - 1)) * KD + i % (KD / 8) * 8);
  }
  // Or their rope parts turned here: a warp's heads go side by side, and loads of all are issued before the first is used.
  // behind_loads: called between.
  template <class BehindLoads>
  DEVICE void make(const BehindLoads& behind_loads) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const LaneTurn<ROPE_LANE> turn(p.mla.rope, token);
    LanePart<ROPE_LANE> parts[HEADS];
    uint4 latents[HEADS][VD / 256];
#pragma unroll
    for (int n = 0; n < HEADS; ++n) {
      const int h = min_int(warp + n * WARPS, heads_here - 1);
      parts[n].load(p.mla.rope_part(token, head0 + h));
#pragma unroll
      for (int i = 0; i < VD / 256; ++i)
        latents[n][i] = load16_now(p.mla.q_latent + (token * p.heads + head0 + h) * VD + (i * 32 + lane) * 8);
    }
    behind_loads();
#pragma unroll
    for (int n = 0; n < HEADS; ++n) {
      const int h = warp + n * WARPS;
#pragma unroll
      for (int i = 0; i < VD / 256; ++i) *reinterpret_cast<uint4*>(room.query_piece(h, i * 32 + lane)) = latents[n][i];
      float x[ROPE_LANE];
      parts[n].unpack(x);
      turn.turn(x);
      *reinterpret_cast<u32*>(room.query_piece(h, VD / 8 + lane / 4) + lane % 4 * 4) = pack_bf16(x[0], x[1]);
    }
  }
};

// The token's own slot from the projections, the latent by warp 0 and the rope key by warp 1: loaded with the queries, then to
// shared memory and to the cache.
template <class Room>
struct LatentsNewest {
  static constexpr int VD = Room::VD, ROPE_LANE = LatentsQueries<Room>::ROPE_LANE;

  LanePart<VD / 32> latent, weight;
  LanePart<ROPE_LANE> rope;

  DEVICE void load(const MlaInput& input, i64 token) {
    const int warp = threadIdx.x / 32;
    if (warp == 0) {
      latent.load(input.kv_a + token * input.kv_a_stride);
      weight.load(input.kv_a_norm);
    } else if (warp == 1) {
      rope.load(input.rope_part(token, input.heads));
    }
  }
  // slot: in the cache; null: another block writes it there.
  DEVICE void make(const MlaInput& input, i64 token, const Room& room, u8* slot) const {
    const int warp = threadIdx.x / 32;
    u16* newest = reinterpret_cast<u16*>(room.newest());
    u16* cached = reinterpret_cast<u16*>(slot);
    if (warp == 0) {
      float x[VD / 32];
      latent.unpack(x);
      norm_part(x, weight, input.eps);
      LanePart<VD / 32>::store(newest, x);
      if (cached != nullptr) LanePart<VD / 32>::store(cached, x);
    } else if (warp == 1) {
      const LaneTurn<ROPE_LANE> turn(input.rope, token);
      float x[ROPE_LANE];
      rope.unpack(x);
      turn.turn(x);
      LanePart<ROPE_LANE>::store(newest + VD, x);
      if (cached != nullptr) LanePart<ROPE_LANE>::store(cached + VD, x);
    }
  }
};
