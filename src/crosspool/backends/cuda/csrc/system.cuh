// Words that two GPUs, or a GPU and its host, share: ordered loads and stores at system scope, and a clock.
#pragma once
#include "common.cuh"

#ifdef CROSSPOOL_EMULATOR
#include <chrono>
DEVICE u64 load_acquire(const u64* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
DEVICE u64 load_relaxed(const u64* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
DEVICE u32 load_relaxed(const u32* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
DEVICE void store_release(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
DEVICE void store_relaxed(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
DEVICE uint4 load_words(const void* p) { check_aligned(p, 16); look_for_words(); uint4 v; memcpy(&v, p, 16); return v; }
DEVICE void store_word(u64* p, u64 v) { *static_cast<volatile u64*>(p) = v; }
DEVICE void system_fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
DEVICE void pause_ns(unsigned) {}
DEVICE void store16(void* p, uint4 v) { check_aligned(p, 16); memcpy(p, &v, 16); }
DEVICE u64 timer_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
#else
DEVICE u64 load_acquire(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEVICE u64 load_relaxed(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEVICE u32 load_relaxed(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void store_release(u64* p, u64 v) { asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEVICE void store_relaxed(u64* p, u64 v) { asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
// Two 8-byte words that a peer may write meanwhile: each is whole, old or new.
DEVICE uint4 load_words(const void* p) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEVICE void store_word(u64* p, u64 v) { asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEVICE void system_fence() { __threadfence_system(); }
DEVICE void pause_ns(unsigned nanoseconds) { __nanosleep(nanoseconds); }
DEVICE void store16(void* p, uint4 v) { *reinterpret_cast<uint4*>(p) = v; }
DEVICE u64 timer_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
#endif
