// The barrier in shared memory that says when what the copy engine brings is there (sm_90 and later).
#pragma once
#include "common.cuh"

#ifdef CROSSPOOL_EMULATOR
struct BulkArrival {
  u64* word;  // turns that have ended, and the bytes that are missing in the present one
  DEVICE void create() const { *word = 0; }
  DEVICE void expect(u32 bytes) const { *word += bytes; }
  DEVICE void arrive(u32 bytes) const {
    *word -= bytes;
    if (static_cast<u32>(*word) == 0) *word += 1ull << 32;
  }
  DEVICE void copy(void* shared, const void* global, u32 bytes) const {
    check_aligned(shared, 16), check_aligned(global, 16);
    memcpy(shared, global, bytes);
    arrive(bytes);
  }
  DEVICE void wait(u32 turn) const { while ((*static_cast<volatile u64*>(word) >> 32) % 2 == turn % 2) spin(); }
};
DEVICE void bulk_fence() {}
#elif __CUDA_ARCH__ >= 900
struct BulkArrival {
  u64* word;  // in shared memory

  DEVICE u32 at() const { return static_cast<u32>(__cvta_generic_to_shared(word)); }
  // One thread, before all others' block_sync.
  DEVICE void create() const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at()) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // One thread, before its copies: how many bytes they bring in all.
  DEVICE void expect(u32 bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at()), "r"(bytes) : "memory");
  }
  // For the copies of turn 0, 1, ...
  DEVICE void wait(u32 turn) const {
    u32 done = 0;
    while (!done)
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
          : "=r"(done)
          : "r"(at()), "r"(turn & 1)
          : "memory");
  }
};
// Between ordinary accesses to shared memory and the copies that overwrite it: every thread, before a block_sync.
DEVICE void bulk_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#else
struct BulkArrival {  // never launched there
  u64* word;
  DEVICE void create() const {}
  DEVICE void expect(u32) const {}
  DEVICE void wait(u32) const {}
};
DEVICE void bulk_fence() {}
#endif
