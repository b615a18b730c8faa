// Routing as kernels of their own: one block an expert computes its logits, the last block to finish chooses.
#include "router.cuh"

KERNEL(route, RouterParams, ROUTER_THREADS, 1) {
  const RouterSmem s = router_smem(dynamic_smem());
  const RouterRow weight(p, blockIdx.x);
  grid_launch_dependents();
  grid_wait();
  if (!is_last_of_logits(p, s, weight)) return;
  choose_all(p, s, [&](int t) { return LogitRow{p.logits + t * gridDim.x}; });
}

struct RoutePutParams {
  RouterParams route;
  Departure departure;        // the flags behind rows and choices, in the peers' memory
  int* ids[MAX_PEERS];        // there: (tokens, top_k)
  float* weights[MAX_PEERS];  // (tokens, top_k)
  float* scales[MAX_PEERS];   // (tokens); written where the shared expert is gated
};

// Routing on the attention side: the choices go where an earlier kernel put the rows, and the flags behind both.
KERNEL(route_put, RoutePutParams, ROUTER_THREADS, 1) {
  const RouterParams& r = p.route;
  const RouterSmem s = router_smem(dynamic_smem());
  const RouterRow weight(r, blockIdx.x);
  grid_launch_dependents();
  grid_wait();
  if (!is_last_of_logits(r, s, weight)) return;
  choose_tokens(r, s, [&](int t) { return LogitRow{r.logits + t * gridDim.x}; });
  for (int peer = 0; peer < p.departure.flags.count; ++peer) {
    for (int i = threadIdx.x; i < r.tokens * r.top_k; i += ROUTER_THREADS) {
      p.ids[peer][i] = s.chosen[i];
      p.weights[peer][i] = r.topk_weights[i];
    }
    if (r.shared_scale != nullptr)
      for (int i = threadIdx.x; i < r.tokens; i += ROUTER_THREADS) p.scales[peer][i] = load_float_l2(r.shared_scale + i);
  }
  depart(p.departure, 1);
}

// The lists alone, where ids and weights came from elsewhere (a router on the attention side).
KERNEL(route_lists, RouterParams, ROUTER_THREADS, 1) {
  const RouterSmem s = router_smem(dynamic_smem());
  grid_launch_dependents();
  grid_wait();
  for (int i = threadIdx.x; i < p.tokens * p.top_k; i += ROUTER_THREADS) s.chosen[i] = known_expert(p, load_u32_l2(p.topk_ids + i));
  block_sync();
  list_experts(p, s);
}
