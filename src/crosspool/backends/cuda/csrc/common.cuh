// Device primitives shared by all kernels: loads, tensor-core products, asynchronous copies, launch overlap.
//
// Sources include no header of the CUDA toolkit, so that NVRTC needs no include path; bfloat16 is a 16-bit pattern.
// With CROSSPOOL_EMULATOR defined, the primitives come from a header that runs a block's threads as fibers on a CPU:
// the same kernel text is then tested without a GPU.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifdef CROSSPOOL_EMULATOR
#include "emulator.h"
#else

#define DEVICE __device__ __forceinline__
#ifdef __CUDACC_RTC__  // NVRTC lacks this builtin of the host compilers
#define __builtin_huge_valf() __uint_as_float(0x7f800000u)
#endif
#define KERNEL(name, Params, threads, min_blocks) \
  extern "C" __global__ void __launch_bounds__(threads, min_blocks) name(const __grid_constant__ Params p)

// One array for the whole kernel; every body carves its regions from it.
extern __shared__ __align__(1024) u8 dynamic_smem_bytes[];
DEVICE u8* dynamic_smem() { return dynamic_smem_bytes; }

DEVICE void block_sync() { __syncthreads(); }
DEVICE void warp_sync() { __syncwarp(); }
DEVICE float shfl_xor(float v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
DEVICE int shfl_xor(int v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
DEVICE float shfl(float v, int lane) { return __shfl_sync(~0u, v, lane); }
DEVICE int shfl(int v, int lane) { return __shfl_sync(~0u, v, lane); }
DEVICE u64 shfl(u64 v, int lane) { return __shfl_sync(~0u, v, lane); }
DEVICE int atomic_add(int* address, int value) { return atomicAdd(address, value); }
DEVICE void atomic_or(int* address, int bits) { atomicOr(address, bits); }
DEVICE void device_fence() { __threadfence(); }
DEVICE u64 atomic_add(u64* address, u64 value) { return atomicAdd(address, value); }
DEVICE u64 load_acquire_device(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEVICE u64 load_relaxed_device(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void store_relaxed_device(u64* p, u64 v) { asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEVICE void store_release_device(u64* p, u64 v) { asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEVICE void add_release_device(u64* p, u64 v) { asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEVICE void add_relaxed_device(u64* p, u64 v) { asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEVICE void spin() {}

// Weights are read once: keep them out of L1.
DEVICE uint4 load_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
DEVICE uint4 load16(const void* p) { return *reinterpret_cast<const uint4*>(p); }
// Not put off until its value is used.
DEVICE uint4 load16_now(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
DEVICE uint2 load8(const void* p) { return *reinterpret_cast<const uint2*>(p); }
DEVICE float4 load_float4(const float* p) { return *reinterpret_cast<const float4*>(p); }
// Data another block wrote during this kernel: past L1.
DEVICE float load_float_l2(const float* p) { return __ldcg(p); }
DEVICE u32 load_u32_l2(const int* p) { return static_cast<u32>(__ldcg(p)); }
DEVICE float4 load_float4_l2(const float* p) { return __ldcg(reinterpret_cast<const float4*>(p)); }
// The largest value of a warp's lanes.
DEVICE u32 warp_max_u32(u32 v) { return __reduce_max_sync(~0u, v); }
DEVICE int count_bits(int v) { return __popc(v); }
// The lowest lane where `v` is true, which it is for at least one.
DEVICE int first_lane(bool v) { return __ffs(__ballot_sync(~0u, v)) - 1; }

DEVICE float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float exp_full(float x) { return expf(x); }
DEVICE float log2_full(float x) { return log2f(x); }
// 1 / sqrt(x), two units in the last place off at most: exact ones are long chains, with branches for the rarest values.
DEVICE float reciprocal_root(float x) { float y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// 1 / x, one unit in the last place off at most.
DEVICE float reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE void sincos_small(float x, float* s, float* c) { sincosf(x, s, c); }
// Rounded as written, whatever stands beside them: for sums that two kernels take with the same bits.
DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float float_of_bits(u32 v) { return __uint_as_float(v); }
DEVICE u32 bits_of_float(float v) { return __float_as_uint(v); }
DEVICE double round_even(double x) { return rint(x); }
DEVICE u32 multiply_high(u32 a, u32 b) { return __umulhi(a, b); }

// Two floats to two bfloat16, round to nearest even; `low` lands in the low half.
DEVICE u32 pack_bf16(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// c (16 x 8) += a (16 x 16) * b (16 x 8), bf16 in, fp32 out. Lane l, g = l / 4, q = l % 4 holds
// a0 (row g, k 2q), a1 (row g + 8, k 2q), a2 (row g, k 2q + 8), a3 (row g + 8, k 2q + 8); b0 (k 2q, col g),
// b1 (k 2q + 8, col g); c0, c1 (row g, col 2q, 2q + 1), c2, c3 (row g + 8).
DEVICE void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Four 8 x 8 matrices of 16-bit elements; lane l passes the address of row l % 8 of matrix l / 8.
DEVICE void ldmatrix_x4(u32 (&r)[4], const void* p) {
  u32 address = static_cast<u32>(__cvta_generic_to_shared(p));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* p) {
  u32 address = static_cast<u32>(__cvta_generic_to_shared(p));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
// An 8 x 8 matrix of 16-bit elements, lane l with row l / 4, columns 2 (l % 4) and the next, to its transposed.
DEVICE u32 transpose_8x8(u32 pair) {
  u32 r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}
// A place in shared memory, which the compiler does not work out anew at every use.
typedef u32 SharedAddress;
DEVICE SharedAddress shared_address(const void* p) {
  u32 address = static_cast<u32>(__cvta_generic_to_shared(p));
  asm volatile("" : "+r"(address));
  return address;
}
DEVICE uint4 load16_shared(SharedAddress p) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p));
  return v;
}
// 16 bytes from global to shared memory; zeros where `valid` is false (the source must still be an address).
DEVICE void copy_async16(SharedAddress shared, const void* global, bool valid) {
  int size = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(size) : "memory");
}
DEVICE void copy_async16(SharedAddress shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
// The same of bytes that are read once: they are the first to leave L2 again.
DEVICE u64 leaves_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE void copy_streamed16(SharedAddress shared, const void* global, bool valid) {
  int size = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global), "r"(size),
               "l"(leaves_first()) : "memory");
}
DEVICE void copy_streamed16(SharedAddress shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "l"(leaves_first())
               : "memory");
}
DEVICE void copy_async16(void* shared, const void* global, bool valid) {
  copy_async16(static_cast<SharedAddress>(__cvta_generic_to_shared(shared)), global, valid);
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Programmatic dependent launch (sm_90 and later). Every block of every kernel calls grid_wait before it reads what
// an earlier kernel wrote and before it ends: then the end of one kernel implies the end of all before it. Blocks with
// nothing to do may leave at once, as long as one of their grid waits.
#if __CUDA_ARCH__ >= 900
DEVICE void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void grid_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DEVICE void grid_wait() {}
DEVICE void grid_launch_dependents() {}
#endif

// A cluster: neighbouring blocks along x that run at once and reach each other's shared memory (sm_90 and later).
#if __CUDA_ARCH__ >= 900
#define CLUSTER_KERNEL(name, Params, threads, min_blocks, blocks)                                           \
  extern "C" __global__ void __cluster_dims__(blocks, 1, 1) __launch_bounds__(threads, min_blocks) name( \
      const __grid_constant__ Params p)
// All threads of all its blocks meet, in two halves: what was written before is there behind the wait.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// To where block `rank` of the cluster has what lies at `shared` here. NOTE: once all its blocks have begun.
DEVICE void store_cluster(u16* shared, int rank, u16 value) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(static_cast<u32>(__cvta_generic_to_shared(shared))), "r"(rank));
  asm volatile("st.shared::cluster.u16 [%0], %1;" ::"r"(there), "h"(value) : "memory");
}
#else
#define CLUSTER_KERNEL(name, Params, threads, min_blocks, blocks) KERNEL(name, Params, threads, min_blocks)
DEVICE void cluster_arrive() {}  // never launched there
DEVICE void cluster_wait() {}
DEVICE void store_cluster(u16*, int, u16) {}
#endif

#endif  // CROSSPOOL_EMULATOR

DEVICE float bf16_low(u32 pair) { return float_of_bits(pair << 16); }
DEVICE float bf16_high(u32 pair) { return float_of_bits(pair & 0xffff0000u); }
DEVICE float bf16_value(u16 v) { return float_of_bits(static_cast<u32>(v) << 16); }
DEVICE u16 bf16_bits(float v) { return static_cast<u16>(pack_bf16(v, 0.0f) & 0xffffu); }

DEVICE float warp_sum(float v) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) v += shfl_xor(v, mask);
  return v;
}
DEVICE float warp_max(float v) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) v = fmaxf(v, shfl_xor(v, mask));
  return v;
}
DEVICE int min_int(int a, int b) { return a < b ? a : b; }
DEVICE int max_int(int a, int b) { return a > b ? a : b; }
DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Sum over a block of `threads` threads; every thread gets it. `scratch` holds threads / 32 + 1 floats.
DEVICE float block_sum(float v, float* scratch, int threads) {
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  block_sync();
  float total = 0.0f;
  for (int w = 0; w < threads / 32; ++w) total += scratch[w];
  block_sync();
  return total;
}

// Where all blocks of a grid meet; every one of them must be resident. The counter only grows, by gridDim.x a meeting, so
// nothing is reset. Made before this block's first meeting of the launch: until then the counter cannot pass it.
struct GridMeeting {
  static constexpr u32 EPOCH_BIT = 1u << 31;
  u64* counter;
  u64 target;  // of the next meeting

  DEVICE explicit GridMeeting(u64* counter)
      : counter(counter), target((load_relaxed_device(counter) / gridDim.x + 1) * gridDim.x) {}
  // The next meeting's number, below its highest bit, which is set: so it is never zero, which new memory holds, though
  // numbers come round after 2^31 meetings, some thirty hours of layers without a pause.
  DEVICE u32 epoch() const { return static_cast<u32>(target / gridDim.x) | EPOCH_BIT; }
  static DEVICE u32 epoch_after(u32 epoch) { return (epoch + 1) | EPOCH_BIT; }
  // What this block wrote so far is there for all once `wait` returns; all its threads are behind a block_sync.
  DEVICE void arrive() {
    if (threadIdx.x == 0) {
      device_fence();
      add_release_device(counter, 1);
    }
  }
  DEVICE void wait() {
    if (threadIdx.x == 0)
      while (load_acquire_device(counter) < target) spin();
    block_sync();
    target += gridDim.x;
  }
  // In place of both where nothing is handed over by the counter: epochs go on. NOTE: only where no block can go on
  // before every block of the grid has come this far.
  DEVICE void pass_by() {
    if (threadIdx.x == 0) add_relaxed_device(counter, 1);
    target += gridDim.x;
  }
};
