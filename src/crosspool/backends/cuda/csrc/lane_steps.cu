// How the kernels of a lane follow one another: what the host is told between two halves of a layer, where it drives them.
#include "crossing.cuh"

struct SeeParams {
  LaneView view;
  Flags flags;  // in this rank's memory, one a peer
  int layer;
};

// Wait for every peer's part of a layer, then tell the host, which launches what comes next.
KERNEL(see, SeeParams, 32, 1) {
  grid_launch_dependents();
  grid_wait();
  const u64 base = load_relaxed(p.view.lane + BASE);
  await(p.view, p.flags, base, p.layer);
  warp_sync();
  if (threadIdx.x == 0) {
    system_fence();
    store_release(p.view.host + SEEN, base + p.layer + 1);
  }
}
