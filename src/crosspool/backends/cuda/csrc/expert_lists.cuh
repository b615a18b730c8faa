// For each chosen expert the (token, choice) pairs that it serves, in token order, so that later sums have a fixed order.
#pragma once
#include "router_params.cuh"

// One token's lists: a choice's place is the number of smaller ids, and of the same id before it (as in `list_experts`).
DEVICE void list_one_token(const RouterParams& p, const int* chosen) {
  const int k = threadIdx.x;
  if (k > p.top_k) return;
  p.unique_offsets[k] = k;
  if (k == p.top_k) {
    *p.num_unique = k;
    return;
  }
  int place = 0;
#pragma unroll 8
  for (int other = 0; other < p.top_k; ++other) place += chosen[other] < chosen[k] + (other < k);
  p.unique_ids[place] = chosen[k];
  p.expert_pairs[place] = k;
}

// An id that came from elsewhere; where its rows were given up, it may be anything.
DEVICE int known_expert(const RouterParams& p, u32 id) { return id < static_cast<u32>(p.experts) ? static_cast<int>(id) : 0; }

// From `s.chosen`, (tokens, top_k): the pairs grouped by expert, experts ascending, pairs in token order. A token's experts
// are all different, but where its rows were given up: such lists hold what they may hold, whichever of its pairs.
DEVICE void list_experts(const RouterParams& p, const RouterSmem& s) {
  if (p.tokens == 1) return list_one_token(p, s.chosen);
  const int lane = threadIdx.x % 32, pairs = p.tokens * p.top_k;
  int* const tokens = s.counts;                           // of an expert: a bit each
  int* const starts = reinterpret_cast<int*>(s.choice);  // its first pair's place
#pragma unroll 1
  for (int e = threadIdx.x; e < p.experts; e += ROUTER_THREADS) tokens[e] = 0;
  block_sync();
#pragma unroll 1
  for (int pair = threadIdx.x; pair < pairs; pair += ROUTER_THREADS) atomic_or(tokens + s.chosen[pair], 1 << pair / p.top_k);
  block_sync();
  if (threadIdx.x < 32) {  // a lane looks after neighbours; one sum carries pairs (high half) and experts (low half)
    const int each = ceil_div(p.experts, 32), end = min_int((lane + 1) * each, p.experts);
    int mine = 0;
#pragma unroll 1
    for (int e = lane * each; e < end; ++e)
      if (tokens[e] != 0) mine += (count_bits(tokens[e]) << 16) + 1;
    int sum = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {  // inclusive over the lanes
      const int other = shfl(sum, lane >= step ? lane - step : lane);
      if (lane >= step) sum += other;
    }
    if (lane == 31) {
      *p.num_unique = sum & 0xffff;
      p.unique_offsets[sum & 0xffff] = sum >> 16;
    }
#pragma unroll 1
    for (int e = lane * each, before = sum - mine; e < end; ++e) {
      if (tokens[e] == 0) continue;
      p.unique_ids[before & 0xffff] = e;
      p.unique_offsets[before & 0xffff] = starts[e] = before >> 16;
      before += (count_bits(tokens[e]) << 16) + 1;
    }
  }
  block_sync();
#pragma unroll 1
  for (int pair = threadIdx.x; pair < pairs; pair += ROUTER_THREADS) {
    const int e = s.chosen[pair], earlier = tokens[e] & ((1 << pair / p.top_k) - 1);
    p.expert_pairs[starts[e] + count_bits(earlier)] = pair;
  }
}
