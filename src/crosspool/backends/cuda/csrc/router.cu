// Routing as a kernel of its own: one block an expert computes its logits, the last block to finish chooses.
#include "router.cuh"

KERNEL(route, RouterParams, ROUTER_THREADS, 1) {
  const RouterSmem s = router_smem(dynamic_smem());
  const int rows = gridDim.x, row = blockIdx.x;
  const RouterRow weight(p, row);
  grid_wait_for(p.arrival);
  weight.logits(p, row, s.sums, [&](int t, float logit) { p.logits[t * rows + row] = logit; });
  if (threadIdx.x == 0) {
    device_fence();
    *s.last = atomic_add(p.ticket, 1) == rows - 1;
    device_fence();
  }
  block_sync();
  if (!*s.last) return;
  if (threadIdx.x == 0) *p.ticket = 0;
  choose_all(p, s, [&](int t) { return LogitRow{p.logits + t * rows}; });
}

// The lists alone, where ids and weights came from elsewhere (a router on the attention side).
KERNEL(route_lists, RouterParams, ROUTER_THREADS, 1) {
  const RouterSmem s = router_smem(dynamic_smem());
  grid_launch_dependents();
  grid_wait();
  for (int i = threadIdx.x; i < p.tokens * p.top_k; i += ROUTER_THREADS) s.chosen[i] = p.topk_ids[i];
  block_sync();
  list_experts(p, s.chosen, s.counts);
}
