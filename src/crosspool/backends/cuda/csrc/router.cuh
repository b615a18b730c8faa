// Which experts each of few tokens goes to, and for each expert the (token, choice) pairs that it serves: the parts that
// kernels share. Arithmetic is fp32 throughout.
#pragma once
#include "expert_lists.cuh"
#include "router_choice.cuh"
#include "router_logits.cuh"
#include "router_looks.cuh"

// This warp's part of every `each`th token from the `first`th on; it looks at the next one's logits while it chooses.
template <int PER_LANE, class Row>
DEVICE void choose_own(const RouterParams& p, const RouterSmem& s, const Row& row, int first, int each) {
  const int warp = threadIdx.x / 32, begin = first + warp * each, step = ROUTER_WARPS * each;
  float *choice = s.choice + warp * MAX_EXPERTS, *scores = s.scores + warp * MAX_EXPERTS;
  if (begin >= p.tokens) return;
  auto seen = row(begin).template look<PER_LANE>(p.experts);
#pragma unroll 1
  for (int t = begin; t < p.tokens; t += step) {
    auto coming = seen;
    if (t + step < p.tokens) coming = row(t + step).template look<PER_LANE>(p.experts);
    choose<PER_LANE>(p, row(t), seen, t, choice, scores, s.chosen);
    seen = coming;
  }
}

// Ids and weights of every token, or of every `each`th from the `first`th on, to where `p` points. `row(token)`: its logits.
template <class Row>
DEVICE void choose_tokens(const RouterParams& p, const RouterSmem& s, const Row& row, int first = 0, int each = 1) {
  if (p.experts <= 128) choose_own<4>(p, s, row, first, each);
  else choose_own<MAX_EXPERTS / 32>(p, s, row, first, each);
  block_sync();
}

// The same, and the lists.
template <class Row>
DEVICE void choose_all(const RouterParams& p, const RouterSmem& s, const Row& row) {
  choose_tokens(p, s, row);
  list_experts(p, s);
}

// One block's row of logits to all; true in the block that finds the others' too.
DEVICE bool is_last_of_logits(const RouterParams& p, const RouterSmem& s, const RouterRow& weight) {
  const int rows = gridDim.x, row = blockIdx.x;
  weight.logits(p, row, s.sums, [&](int t, float logit) { p.logits[t * rows + row] = logit; });
  if (threadIdx.x == 0) {
    device_fence();
    *s.last = atomic_add(p.ticket, 1) == rows - 1;
    device_fence();
  }
  block_sync();
  if (*s.last && threadIdx.x == 0) *p.ticket = 0;
  return *s.last;
}
