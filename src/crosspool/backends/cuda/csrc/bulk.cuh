// The copy engine of sm_90 and later: rows from global to shared memory, counted by a barrier in shared memory.
#pragma once
#include "common.cuh"

#ifndef CROSSPOOL_EMULATOR
#if __CUDA_ARCH__ >= 900
DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
// One thread; block_sync follows before the barrier is used.
DEVICE void barrier_init(u64* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// One thread: the barrier's phase ends once so many bytes have come.
DEVICE void barrier_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// Until the phase of this parity has ended.
DEVICE void barrier_wait(u64* barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  } while (!done);
}
// One thread; bytes and both addresses are multiples of 16.
DEVICE void copy_bulk(void* shared, const void* global, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
// One thread: bytes, a multiple of 16, on their way to L2.
DEVICE void prefetch_l2_bulk(const void* global, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}
#else  // kernels that use these are not launched there
DEVICE void barrier_init(u64*) {}
DEVICE void barrier_expect(u64*, u32) {}
DEVICE void barrier_wait(u64*, u32) {}
DEVICE void copy_bulk(void*, const void*, u32, u64*) {}
DEVICE void prefetch_l2_bulk(const void*, u32) {}
#endif
#endif
