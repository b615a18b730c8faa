// Brings weights into L2 while the GPU waits for another: the kernels that read them then run at L2 speed.
#include "common.cuh"

constexpr int PREFETCH_THREADS = 256;
constexpr int MAX_REGIONS = 16;
constexpr int LINE_BYTES = 128;

struct PrefetchParams {
  const u8* regions[MAX_REGIONS];
  i64 bytes[MAX_REGIONS];
  int num_regions;
};

KERNEL(prefetch_weights, PrefetchParams, PREFETCH_THREADS, 1) {
  for (int r = 0; r < p.num_regions; ++r)
    for (i64 at = (static_cast<i64>(blockIdx.x) * PREFETCH_THREADS + threadIdx.x) * LINE_BYTES; at < p.bytes[r];
         at += static_cast<i64>(gridDim.x) * PREFETCH_THREADS * LINE_BYTES)
      prefetch_l2(p.regions[r] + at);
  grid_launch_dependents();
  grid_wait();
}
