// The FFN of few tokens as one kernel that holds the whole device.
//
// NOTE: blocks wait for each other, so all of them must be resident: the launch is cooperative, one block a
// multiprocessor.
#include "moe_layer.cuh"

template <bool FEW>
DEVICE void compute(const FusedParams& p) {
  FusedLayer<FEW> layer(p, dynamic_smem());
  grid_launch_dependents();
  grid_wait();
  GridMeeting meeting(p.meetings);
  const u64 base = base_of(p.moe);
  const u32 epoch_out = out_epoch(p.moe, base);
  layer.run(meeting, base, [=] { return epoch_out; });
  depart(p.moe.departure, gridDim.x);
}

KERNEL(moe_fused_few, FusedParams, MOE_THREADS, 1) { compute<true>(p); }
KERNEL(moe_fused, FusedParams, MOE_THREADS, 1) { compute<false>(p); }
