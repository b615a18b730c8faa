// The FFN of few tokens as two kernels: gate and up with the activation, then down. Dense layers, routers elsewhere, and
// GPUs where one kernel cannot hold the whole device.
#include "moe_down.cuh"
#include "moe_up.cuh"

KERNEL(moe_gate_up, MoeParams, MOE_THREADS, 1) {
  float* red = reinterpret_cast<float*>(dynamic_smem() + UP_STAGES * STAGE_BYTES);
  const int red_floats = MOE_WARPS * ceil_div(p.tokens, TILE_COLS) * RED_FLOATS;
  const Lists lists(p, reinterpret_cast<int*>(red + 2 * red_floats));
  UpStep<UP_STAGES, MAX_GROUPS> up(p, dynamic_smem(), lists, red);
  up.load_shared();
  grid_wait();
  grid_launch_dependents();  // not before the router has ended: the next kernel reads its lists without waiting
  int unique = 0;
  if (p.num_unique != nullptr) {
    unique = *p.num_unique;
    lists.copy(p);
    block_sync();
  }
  NothingNext nothing;
  up.run(unique, nothing);
}

KERNEL(moe_down, MoeParams, MOE_THREADS, 1) {
  u8* near = dynamic_smem() + DOWN_STAGES * STAGE_BYTES;
  float* sums = reinterpret_cast<float*>(near + COLUMN_BYTES);            // MOE_WARPS * tokens * OUT_STRIDE
  float* weights = sums + MOE_WARPS * p.tokens * OUT_STRIDE;              // tokens * top_k
  const Lists lists(p, reinterpret_cast<int*>(weights + p.tokens * p.top_k));
  int unique = 0;
  if (p.num_unique != nullptr) {
    lists.copy(p);
    for (int i = threadIdx.x; i < p.tokens * p.top_k; i += MOE_THREADS) weights[i] = p.topk_weights[i];
    unique = *p.num_unique;
  }
  block_sync();
  grid_launch_dependents();
  DownStep<DOWN_STAGES> down(p, dynamic_smem(), near, lists, weights, sums, unique);
  down.begin(blockIdx.x);
  grid_wait();
  down.run(out_epoch(p, base_of(p)));
  depart(p.departure, gridDim.x);
}
