// What the down projection reads beside its weights: activations where they lie, or gathered near, and for few tokens a
// table of the pairs and weights of each chosen expert.
#pragma once
#include "moe_stream.cuh"

// Where the down projection reads activations.
struct Acts {
  const u16 *routed, *shared;

  DEVICE explicit Acts(const MoeParams& p) : routed(p.act), shared(p.shared_act) {}
  // Shared memory that holds both, routed ones first.
  DEVICE Acts(const MoeParams& p, const u16* near) : routed(near), shared(near + p.tokens * p.top_k * p.width) {}
  DEVICE static int num_values(const MoeParams& p) { return p.tokens * (p.top_k * p.width + p.shared_width); }
};

// All activations of a layer to `near`, as soon as they are there; call block_sync afterwards. Where no wait holds layers
// apart (a pass given up, a profiler), words of the next one may be found: the result is void. So it is where `never_come`
// tells, which is seldom asked, that some may not.
template <class NeverCome, class Meanwhile>
DEVICE void gather_words(const MoeParams& p, u32 epoch, u16* near, const NeverCome& never_come,
                         const Meanwhile& meanwhile) {
  constexpr int AT_ONCE = 8, STEP = MOE_THREADS * 2;
  constexpr u32 PATIENCE = 1024;  // looks before the one at whether all words are to come
  const u32 after = GridMeeting::epoch_after(epoch);
  const auto is_there = [&](u32 of) { return of == epoch || of == after; };
  const int words = Acts::num_values(p) / 2;
  bool is_first = true;
  for (int i0 = threadIdx.x * 2; is_first || i0 < words; i0 += STEP * AT_ONCE, is_first = false) {
    uint4 held[AT_ONCE];
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n)  // all loads before the first use
      held[n] = i0 + n * STEP < words ? load_words(p.act_words + i0 + n * STEP) : uint4{0, epoch, 0, epoch};
    if (is_first) meanwhile();
    for (u32 looks = 1;; ++looks) {
      bool is_whole = true;
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n) is_whole = is_whole && is_there(held[n].y) && is_there(held[n].w);
      if (is_whole || (looks % PATIENCE == 0 && never_come())) break;
      spin();
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n)  // what is there is not looked at again
        if (!is_there(held[n].y) || !is_there(held[n].w)) held[n] = load_words(p.act_words + i0 + n * STEP);
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n)
      if (i0 + n * STEP < words) reinterpret_cast<uint2*>(near)[i0 / 2 + n * STEP / 2] = uint2{held[n].x, held[n].z};
  }
}

// The same, once all blocks have met.
DEVICE void gather(const MoeParams& p, u16* near) {
  const int routed = p.tokens * p.top_k * p.width, all = Acts::num_values(p);
  for (int i = threadIdx.x * 8; i < all; i += MOE_THREADS * 8)
    *reinterpret_cast<uint4*>(near + i) = load16(i < routed ? p.act + i : p.shared_act + (i - routed));
}

// Of each chosen expert, the pair and the weight of every token of few; no pair: -1, whose weight is 0.
struct TokenTable {
  static constexpr int TOKENS = TILE_COLS;
  int* pairs;  // (experts, TOKENS)
  float* weights;

  DEVICE TokenTable(void* smem, int max_unique)
      : pairs(static_cast<int*>(smem)), weights(reinterpret_cast<float*>(pairs + max_unique * TOKENS)) {}
  DEVICE static bool serves(int tokens) { return tokens > 1 && tokens <= TOKENS; }
  DEVICE static int num_bytes(const MoeParams& p) { return serves(p.tokens) ? 8 * TOKENS * p.max_unique : 0; }
  // A thread an expert; call block_sync afterwards.
  DEVICE void fill(const Lists& lists, const float* of_pairs, int unique) const {
    for (int u = threadIdx.x; u < unique; u += MOE_THREADS) {
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) pairs[u * TOKENS + t] = -1, weights[u * TOKENS + t] = 0.0f;
#pragma unroll 1
      for (int i = lists.offsets[u]; i < lists.offsets[u + 1]; ++i) {
        const int at = u * TOKENS + lists.token(i), pair = lists.pair(i);
        pairs[at] = pair, weights[at] = of_pairs[pair];
      }
    }
  }
};
