// One warp chooses one token's experts: scores, groups, the best of them, and their weights.
#pragma once
#include "router_params.cuh"

// A float as an integer that orders the same way; NaN orders below all numbers.
DEVICE u32 orderable(float v) {
  const u32 bits = bits_of_float(v);
  if (v != v) return 0;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The lane with the best `v`, the lowest among equals. A lane without a candidate passes false.
DEVICE int best_lane(float v, bool is_candidate) {
  const u32 key = is_candidate ? orderable(v) : 0;
  return first_lane(key == warp_max_u32(key));
}

// Experts outside the best groups get -inf. `choice`: this warp's scores in shared memory.
DEVICE void mask_groups(const RouterParams& p, float* choice) {
  const int lane = threadIdx.x % 32, size = p.experts / p.num_groups;
  float mine = -__builtin_huge_valf();
  if (lane < p.num_groups) {
    float best = -__builtin_huge_valf(), second = best;
    for (int e = lane * size; e < (lane + 1) * size; ++e) {
      if (choice[e] > best) second = best, best = choice[e];
      else if (choice[e] > second) second = choice[e];
    }
    mine = p.group_top2 ? best + second : best;
  }
  bool kept = false;
  for (int round = 0; round < p.topk_groups; ++round) {
    if (lane == best_lane(mine, !kept && lane < p.num_groups)) kept = true;
  }
  if (lane < p.num_groups && !kept)
    for (int e = lane * size; e < (lane + 1) * size; ++e) choice[e] = -__builtin_huge_valf();
  warp_sync();
}

// ids: the experts of the `top_k` best keys, best first, the lowest expert among equals; a lane has PER_LANE neighbours.
template <int PER_LANE>
DEVICE void take_best(u32 (&keys)[PER_LANE], int* ids, int top_k) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int k = 0; k < top_k; ++k) {
    u32 mine = keys[0];
#pragma unroll
    for (int i = 1; i < PER_LANE; ++i) mine = keys[i] > mine ? keys[i] : mine;
    const u32 best = warp_max_u32(mine);
    if (lane == first_lane(mine == best)) {
      int found = 0;
#pragma unroll
      for (int i = PER_LANE - 1; i >= 0; --i) found = keys[i] == best ? i : found;
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) keys[i] = i == found ? 0 : keys[i];
      ids[k] = lane * PER_LANE + found;
    }
  }
}

// The same where a lane has few: it sorts them first, and then looks at the best of them only.
template <int PER_LANE>
DEVICE void take_best_sorted(u32 (&keys)[PER_LANE], int* ids, int top_k) {
  const int lane = threadIdx.x % 32;
  int expert[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) expert[i] = lane * PER_LANE + i;
#pragma unroll
  for (int pass = 1; pass < PER_LANE; ++pass)
#pragma unroll
    for (int i = PER_LANE - 1; i >= pass; --i) {  // only a larger key passes a lower expert
      const bool is_larger = keys[i] > keys[i - 1];
      const u32 key = keys[i];
      const int id = expert[i];
      keys[i] = is_larger ? keys[i - 1] : key, expert[i] = is_larger ? expert[i - 1] : id;
      keys[i - 1] = is_larger ? key : keys[i - 1], expert[i - 1] = is_larger ? id : expert[i - 1];
    }
#pragma unroll 1
  for (int k = 0; k < top_k; ++k) {
    const bool is_taken = lane == first_lane(keys[0] == warp_max_u32(keys[0]));
    if (is_taken) ids[k] = expert[0];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      keys[i] = !is_taken ? keys[i] : i + 1 < PER_LANE ? keys[i + 1 < PER_LANE ? i + 1 : i] : 0;
      expert[i] = is_taken && i + 1 < PER_LANE ? expert[i + 1 < PER_LANE ? i + 1 : i] : expert[i];
    }
  }
}

// One warp, one token: scores, choice, weights. `choice` and `scores` are this warp's rows of shared memory; a lane
// looks after PER_LANE neighbouring experts. seen: a look at the token's logits.
template <int PER_LANE, class Logits, class Look>
DEVICE void choose(const RouterParams& p, const Logits& logits, const Look& seen, int token, float* choice, float* scores,
                   int* chosen) {
  const int lane = threadIdx.x % 32;
  float held[PER_LANE], bias[PER_LANE], top = -__builtin_huge_valf();
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int e = lane * PER_LANE + i;
    held[i] = -__builtin_huge_valf();
    bias[i] = p.logit_bias != nullptr && e < p.experts ? p.logit_bias[e] : 0.0f;
  }
  logits.read(seen, held, p.experts);
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) held[i] += bias[i];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) top = fmaxf(top, held[i]);
  top = warp_max(top);
  if (p.score == SOFTMAX) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) sum += held[i] = exp_full(held[i] - top);
    const float scale = reciprocal(warp_sum(sum));
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) held[i] *= scale;
  } else if (p.score == SIGMOID) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) held[i] = reciprocal(1.0f + exp_full(-held[i]));
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int e = lane * PER_LANE + i;
    if (e >= p.experts) continue;
    scores[e] = held[i];
    if (p.choice_bias != nullptr) held[i] += p.choice_bias[e];
    if (p.num_groups > 1) choice[e] = held[i];
  }
  warp_sync();
  if (p.num_groups > 1) {
    mask_groups(p, choice);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      if (lane * PER_LANE + i < p.experts) held[i] = choice[lane * PER_LANE + i];
  }

  u32 keys[PER_LANE];  // order as the values do, NaN last; 0: chosen, or no expert
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const u32 key = orderable(held[i]);
    keys[i] = lane * PER_LANE + i >= p.experts ? 0 : key > 0 ? key : 1;
  }
  int* ids = chosen + token * p.top_k;
  if constexpr (PER_LANE <= 4) take_best_sorted(keys, ids, p.top_k);
  else take_best(keys, ids, p.top_k);
  warp_sync();
  const int id = lane < p.top_k ? ids[lane] : 0;
  float weight = lane < p.top_k ? scores[id] : 0.0f;  // of choice `lane`
  if (p.score == SOFTMAX_OF_TOPK) {
    const float most = warp_max(lane < p.top_k ? weight : -__builtin_huge_valf());
    weight = lane < p.top_k ? exp_full(weight - most) : 0.0f;
    weight *= reciprocal(warp_sum(weight));
  }
  if (p.renormalise) {
    const float sum = warp_sum(lane < p.top_k ? weight : 0.0f);
    weight *= reciprocal(fmaxf(sum + p.renormalise_eps, 1e-37f));
  }
  if (lane < p.top_k) {
    p.topk_ids[token * p.top_k + lane] = id;
    p.topk_weights[token * p.top_k + lane] = weight * p.scale;
  }
  warp_sync();  // the next token overwrites the scores
}
