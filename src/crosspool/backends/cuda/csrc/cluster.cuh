// Blocks of a cluster (sm_90 and later) read each other's shared memory.
#pragma once
#include "common.cuh"

#ifndef CROSSPOOL_EMULATOR
#if __CUDA_ARCH__ >= 900
DEVICE int cluster_rank() { u32 v; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(v)); return v; }
DEVICE int cluster_size() { u32 v; asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(v)); return v; }
// Every thread of every block arrives and waits, in turns; what was written before an arrival is seen after the wait.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// What lies at `mine`'s place in the shared memory of block `rank`.
DEVICE float4 load_float4_of(const float* mine, int rank) {
  float4 v;
  asm volatile("{\n.reg .u32 at;\nmapa.shared::cluster.u32 at, %4, %5;\nld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [at];\n}\n"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(static_cast<u32>(__cvta_generic_to_shared(mine))), "r"(rank) : "memory");
  return v;
}
DEVICE float load_float_of(const float* mine, int rank) {
  float v;
  asm volatile("{\n.reg .u32 at;\nmapa.shared::cluster.u32 at, %1, %2;\nld.shared::cluster.f32 %0, [at];\n}\n"
               : "=f"(v) : "r"(static_cast<u32>(__cvta_generic_to_shared(mine))), "r"(rank) : "memory");
  return v;
}
#else  // kernels that use these are not launched there
DEVICE int cluster_rank() { return 0; }
DEVICE int cluster_size() { return 1; }
DEVICE void cluster_arrive() {}
DEVICE void cluster_wait() {}
DEVICE float4 load_float4_of(const float* mine, int) { return load_float4(mine); }
DEVICE float load_float_of(const float* mine, int) { return *mine; }
#endif
#endif
