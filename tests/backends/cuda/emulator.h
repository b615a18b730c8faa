// Runs one block of a kernel at a time on a CPU: each thread is a fiber, and a barrier or warp operation switches
// fibers until all have arrived. Blocks run one after another, so kernels whose blocks wait for later blocks hang here.
// Threads of this process may each run a kernel of another source: its state is its library's own.
// What a thread copies asynchronously arrives when it waits for it, and not before: a wait for too few copies shows.
// Of a cluster each block goes on, before the next one does, until none of its threads can: what a block takes of others
// without a meeting is not there yet, and what it gives to one that has not begun, or has ended, is told.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };

namespace emulator {
struct Dim { unsigned x, y, z; };
// An asynchronous copy that its thread has not waited for: until then NaN lies where it goes.
struct Copy {
  unsigned group;
  u8* to;
  u8 bytes[16];
};
struct Fiber {
  ucontext_t start;
  jmp_buf point;
  bool started = false, done = false;
  Dim thread{0, 0, 0};
  struct Block* block = nullptr;
  char* stack = nullptr;
  unsigned cluster_turn = 0;  // of the cluster's meetings, where this thread has arrived
  unsigned copy_group = 0;    // of asynchronous copies: the one that is still open
  std::vector<Copy> copies;
};
struct Barrier { unsigned arrived = 0, generation = 0; };
struct Warp { Barrier barrier; u64 slot[32][12]; };

struct Block {
  Dim idx{0, 0, 0};
  Barrier barrier;
  std::vector<Warp> warps;
  std::vector<unsigned char> smem;
  unsigned left = 0;          // threads that have not ended
  bool has_begun = false;
  bool has_released = false;  // a thread has let the kernels behind begin
};

static std::vector<Fiber> fibers;
static bool cooperative = false;  // all blocks run side by side; else one after another
static std::vector<Block>* together = nullptr;  // the blocks that run side by side: of a cluster, it
static Barrier cluster_barrier;
static Fiber* current = nullptr;
static jmp_buf scheduler;
static unsigned long moves = 0;  // of all threads: begun, past a barrier, ended
static bool backwards = false;  // blocks run last to first: what depends on their order fails one way or the other
static Dim block_dim, grid_dim;
static std::function<void()> body;
static unsigned looks_after_release = 0;
static const int* overwritten = nullptr;  // by a peer, while blocks read: those of odd numbers find the late words there
static std::vector<u32> late_words;
constexpr size_t kStack = 256 * 1024;

inline void yield() { if (!_setjmp(current->point)) _longjmp(scheduler, 1); }
inline void arrive(Barrier& barrier, unsigned count) {
  unsigned mine = barrier.generation;
  if (++barrier.arrived == count) barrier.arrived = 0, ++barrier.generation;
  while (barrier.generation == mine) yield();
  ++moves;
}
inline void entry() {
  body();
  current->done = true;
  --current->block->left, ++moves;
  _longjmp(scheduler, 1);
}
inline Warp& warp() { return current->block->warps[current->thread.x / 32]; }
inline unsigned lane() { return current->thread.x % 32; }
inline unsigned warp_size() { unsigned left = block_dim.x - current->thread.x / 32 * 32; return left < 32 ? left : 32; }

inline void start(Fiber& fiber, Block& block, unsigned thread) {
  if (!fiber.stack) fiber.stack = static_cast<char*>(malloc(kStack));
  fiber.started = fiber.done = false;
  fiber.copy_group = 0;
  fiber.copies.clear();
  fiber.thread = {thread, 0, 0};
  fiber.block = &block;
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = fiber.stack;
  fiber.start.uc_stack.ss_size = kStack;
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, entry, 0);
}

// Until it yields or has ended.
inline void resume(Fiber& fiber) {
  current = &fiber;
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.point, 1);
  fiber.started = fiber.block->has_begun = true, ++moves;
  setcontext(&fiber.start);
}
// All threads of a block once, the first of which is given; whether any of them moved.
inline bool resume_all(Fiber* of_block, unsigned threads) {
  const unsigned long before = moves;
  for (unsigned i = 0; i < threads; ++i)
    if (!of_block[i].done) resume(of_block[i]);
  return moves != before;
}

inline void run_blocks(std::vector<Block>& blocks, unsigned threads, unsigned smem_bytes) {
  together = &blocks;
  cluster_barrier = Barrier{};
  const unsigned count = blocks.size() * threads;
  if (fibers.size() < count) fibers.resize(count);
  for (unsigned b = 0; b < blocks.size(); ++b) {
    blocks[b].smem.assign(smem_bytes + 2048, 0xff);  // NaN in every floating-point type
    blocks[b].warps.assign((threads + 31) / 32, Warp{});
    blocks[b].left = threads;
    for (unsigned i = 0; i < threads; ++i) start(fibers[b * threads + i], blocks[b], i);
  }
  for (bool is_alive = true; is_alive;) {
    is_alive = false;
    for (unsigned b = 0; b < blocks.size(); ++b) {
      while (resume_all(&fibers[b * threads], threads) && !cooperative) {}
      is_alive |= blocks[b].left > 0;
    }
  }
  for (const Block& block : blocks)
    for (unsigned i = (1024 - reinterpret_cast<u64>(block.smem.data()) % 1024) % 1024 + smem_bytes; i < block.smem.size(); ++i)
      if (block.smem[i] != 0xff) { fprintf(stderr, "wrote past %u bytes of shared memory\n", smem_bytes); abort(); }
}

// cluster: neighbouring blocks along x that run side by side.
inline void launch(std::function<void()> kernel, const unsigned* grid, unsigned threads, unsigned smem_bytes, unsigned cluster = 1) {
  body = kernel;
  block_dim = {threads, 1, 1};
  grid_dim = {grid[0], grid[1], grid[2]};
  const unsigned count = grid[0] * grid[1] * grid[2];
  std::vector<Block> blocks;
  for (unsigned n = 0; n < count; ++n) {
    const unsigned at = backwards ? count - 1 - n : n;
    blocks.emplace_back();
    blocks.back().idx = {at % grid[0], at / grid[0] % grid[1], at / grid[0] / grid[1]};
    if ((cooperative && n + 1 < count) || blocks.size() < cluster) continue;
    run_blocks(blocks, threads, smem_bytes);
    blocks.clear();
  }
}

// Each lane leaves a value, all meet, each lane reads what it wants, all meet again.
template <typename T, typename F>
inline auto exchange(const T& value, F read) {
  static_assert(sizeof(T) <= sizeof(u64) * 12, "too large for a lane's slot");
  Warp& w = warp();
  memcpy(w.slot[lane()], &value, sizeof(T));
  arrive(w.barrier, warp_size());
  auto result = read([&w](unsigned from) { T v; memcpy(&v, w.slot[from], sizeof(T)); return v; });
  arrive(w.barrier, warp_size());
  return result;
}
}  // namespace emulator

// Looks for a peer's words since the last call, by threads of blocks that had let the kernels behind begin.
extern "C" unsigned take_looks_after_release() {
  const unsigned found = emulator::looks_after_release;
  emulator::looks_after_release = 0;
  return found;
}

extern "C" void overwrite_late(const int* at, const u32* words, unsigned count) {
  emulator::overwritten = at;
  emulator::late_words.assign(words, words + count);
}

extern "C" void set_order(int backwards, int cooperative) {
  emulator::backwards = backwards != 0;
  emulator::cooperative = cooperative != 0;
}

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::current->block->idx)
#define blockDim emulator::block_dim
#define gridDim emulator::grid_dim
#define __shared__ static
#define DEVICE inline
#define KERNEL(name, Params, threads, min_blocks)                                                     \
  static void name##_body(const Params& p);                                                           \
  extern "C" unsigned name##_params_bytes() { return sizeof(Params); }                                \
  extern "C" void name(const Params* p, const unsigned* grid, unsigned block, unsigned smem_bytes) {  \
    emulator::launch([p] { name##_body(*p); }, grid, block, smem_bytes);                              \
  }                                                                                                   \
  static void name##_body(const Params& p)

#define CLUSTER_KERNEL(name, Params, threads, min_blocks, cluster)                                    \
  static void name##_body(const Params& p);                                                           \
  extern "C" unsigned name##_params_bytes() { return sizeof(Params); }                                \
  extern "C" void name(const Params* p, const unsigned* grid, unsigned block, unsigned smem_bytes) {  \
    emulator::launch([p] { name##_body(*p); }, grid, block, smem_bytes, cluster);                     \
  }                                                                                                   \
  static void name##_body(const Params& p)

inline u8* dynamic_smem() { return reinterpret_cast<u8*>((reinterpret_cast<u64>(emulator::current->block->smem.data()) + 1023) / 1024 * 1024); }
inline void block_sync() { emulator::arrive(emulator::current->block->barrier, emulator::block_dim.x); }
inline void cluster_arrive() {
  emulator::Barrier& barrier = emulator::cluster_barrier;
  emulator::current->cluster_turn = barrier.generation;
  if (++barrier.arrived == emulator::together->size() * emulator::block_dim.x) barrier.arrived = 0, ++barrier.generation;
}
inline void cluster_wait() {
  while (emulator::cluster_barrier.generation == emulator::current->cluster_turn) emulator::yield();
  ++emulator::moves;
}
inline void store_cluster(u16* shared, int rank, u16 value) {
  const u64 at = reinterpret_cast<u8*>(shared) - dynamic_smem();
  emulator::Block* const mine = emulator::current->block;
  for (emulator::Block& block : *emulator::together) {
    if (static_cast<int>(block.idx.x % emulator::together->size()) != rank) continue;
    if (!block.has_begun || block.left == 0) {
      fprintf(stderr, "wrote to a block of the cluster that %s\n", block.has_begun ? "has ended" : "has not begun");
      abort();
    }
    emulator::current->block = &block;
    u8* there = dynamic_smem() + at;
    emulator::current->block = mine;
    memcpy(there, &value, sizeof(value));
  }
}
inline void warp_sync() { emulator::arrive(emulator::warp().barrier, emulator::warp_size()); }
template <typename T>
inline T shfl(T v, int lane) { return emulator::exchange(v, [lane](auto get) { return get(lane); }); }
template <typename T>
inline T shfl_xor(T v, int mask) { return emulator::exchange(v, [mask](auto get) { return get(emulator::lane() ^ mask); }); }
inline int atomic_add(int* address, int value) { int old = *address; *address += value; return old; }
inline void atomic_or(int* address, int bits) { *address |= bits; }
inline void device_fence() {}
inline u64 atomic_add(u64* address, u64 value) { u64 old = *address; *address += value; return old; }
inline u64 load_acquire_device(const u64* p) { return *static_cast<const volatile u64*>(p); }
inline u64 load_relaxed_device(const u64* p) { return *static_cast<const volatile u64*>(p); }
inline void store_relaxed_device(u64* p, u64 v) { *static_cast<volatile u64*>(p) = v; }
inline void store_release_device(u64* p, u64 v) { *static_cast<volatile u64*>(p) = v; }
inline void add_release_device(u64* p, u64 v) { *p += v; }
inline void add_relaxed_device(u64* p, u64 v) { *p += v; }
inline void spin() { emulator::yield(); }
inline void check_aligned(const void* p, unsigned bytes) {
  if (reinterpret_cast<u64>(p) % bytes) { fprintf(stderr, "misaligned %u-byte access\n", bytes); abort(); }
}
template <typename T>
inline T load_as(const void* p) { check_aligned(p, sizeof(T)); T v; memcpy(&v, p, sizeof(T)); return v; }
inline uint4 load_stream(const void* p) { return load_as<uint4>(p); }
inline uint4 load16(const void* p) { return load_as<uint4>(p); }
inline uint4 load16_now(const void* p) { return load16(p); }
inline uint2 load8(const void* p) { return load_as<uint2>(p); }
inline float4 load_float4(const float* p) { return load_as<float4>(p); }
inline float load_float_l2(const float* p) { return *p; }
inline u32 load_u32_l2(const int* p) {
  const size_t at = p - emulator::overwritten;
  if (emulator::overwritten != nullptr && at < emulator::late_words.size() && blockIdx.x % 2) return emulator::late_words[at];
  return static_cast<u32>(*static_cast<const volatile int*>(p));
}
inline float4 load_float4_l2(const float* p) { return load_as<float4>(p); }
inline u32 warp_max_u32(u32 v) {
  return emulator::exchange(v, [](auto get) { u32 m = 0; for (int i = 0; i < 32; ++i) m = get(i) > m ? get(i) : m; return m; });
}
inline int count_bits(int v) { return __builtin_popcount(static_cast<u32>(v)); }
inline int first_lane(bool v) {
  return emulator::exchange(v, [](auto get) { int lane = 0; while (!get(lane)) ++lane; return lane; });
}
inline float exp2_fast(float x) { return exp2f(x); }
inline float exp_full(float x) { return expf(x); }
inline float log2_full(float x) { return log2f(x); }
inline float reciprocal_root(float x) { return 1.0f / sqrtf(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline float multiply(float a, float b) { return a * b; }
inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
inline void sincos_small(float x, float* s, float* c) { *s = sinf(x); *c = cosf(x); }
inline float float_of_bits(u32 v) { float f; memcpy(&f, &v, 4); return f; }
inline u32 bits_of_float(float f) { u32 v; memcpy(&v, &f, 4); return v; }
inline double round_even(double x) { return rint(x); }
inline u32 multiply_high(u32 a, u32 b) { return static_cast<u32>((static_cast<u64>(a) * b) >> 32); }
inline u32 bf16_round(float f) {
  u32 v = bits_of_float(f);
  if (f != f) return 0x7fff;
  return (v + 0x7fffu + ((v >> 16) & 1)) >> 16;
}
inline u32 pack_bf16(float low, float high) { return bf16_round(low) | (bf16_round(high) << 16); }
inline float half_of(u32 pair, int high) { return float_of_bits(high ? pair & 0xffff0000u : pair << 16); }

struct MmaOperands { u32 a[4], b[2]; };
inline void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  MmaOperands mine{{a0, a1, a2, a3}, {b0, b1}};
  struct Sum { float c[4]; };
  Sum sum = emulator::exchange(mine, [](auto get) {
    unsigned g = emulator::lane() / 4, q = emulator::lane() % 4;
    Sum s{};
    MmaOperands a_lane[4], b_lane[2][4];
    for (unsigned j = 0; j < 4; ++j) {
      a_lane[j] = get(g * 4 + j);
      b_lane[0][j] = get((2 * q) * 4 + j);
      b_lane[1][j] = get((2 * q + 1) * 4 + j);
    }
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < 16; ++k) {
        u32 a = a_lane[k % 8 / 2].a[(i >= 2) + 2 * (k >= 8)];
        u32 b = b_lane[i % 2][k % 8 / 2].b[k >= 8];
        s.c[i] += half_of(a, k % 2) * half_of(b, k % 2);
      }
    return s;
  });
  for (int i = 0; i < 4; ++i) c[i] += sum.c[i];
}
inline void load_matrices(u32 (&r)[4], const void* p, bool transposed) {
  check_aligned(p, 16);
  struct Regs { u32 r[4]; };
  Regs regs = emulator::exchange(p, [transposed](auto get) {
    unsigned g = emulator::lane() / 4, q = emulator::lane() % 4;
    Regs out{};
    for (unsigned m = 0; m < 4; ++m) {
      u16 low, high;
      if (!transposed) {
        const u16* row = static_cast<const u16*>(get(m * 8 + g));
        low = row[2 * q], high = row[2 * q + 1];
      } else {
        low = static_cast<const u16*>(get(m * 8 + 2 * q))[g];
        high = static_cast<const u16*>(get(m * 8 + 2 * q + 1))[g];
      }
      out.r[m] = low | (static_cast<u32>(high) << 16);
    }
    return out;
  });
  memcpy(r, regs.r, sizeof(r));
}
inline void ldmatrix_x4(u32 (&r)[4], const void* p) { load_matrices(r, p, false); }
inline void ldmatrix_x4_trans(u32 (&r)[4], const void* p) { load_matrices(r, p, true); }
inline u32 transpose_8x8(u32 pair) {
  return emulator::exchange(pair, [](auto get) {
    unsigned g = emulator::lane() / 4, q = emulator::lane() % 4;
    auto element = [&](unsigned row) { return get(row * 4 + g / 2) >> g % 2 * 16 & 0xffffu; };
    return static_cast<u32>(element(2 * q) | element(2 * q + 1) << 16);
  });
}
inline void copy_async16(void* shared, const void* global, bool valid) {
  check_aligned(shared, 16);
  emulator::Copy copy{emulator::current->copy_group, static_cast<u8*>(shared), {}};
  if (valid) { check_aligned(global, 16); memcpy(copy.bytes, global, 16); }
  emulator::current->copies.push_back(copy);
  memset(shared, 0xff, 16);
}
typedef u8* SharedAddress;
inline SharedAddress shared_address(const void* p) { return static_cast<u8*>(const_cast<void*>(p)); }
inline uint4 load16_shared(SharedAddress p) { return load16(p); }
inline void copy_async16(void* shared, const void* global) { copy_async16(shared, global, true); }
inline void copy_streamed16(SharedAddress shared, const void* global, bool valid = true) { copy_async16(shared, global, valid); }
inline void copy_async_commit() { ++emulator::current->copy_group; }
template <int N>
inline void copy_async_wait() {
  auto& copies = emulator::current->copies;
  size_t there = 0;
  for (; there < copies.size() && copies[there].group + N < emulator::current->copy_group; ++there)
    memcpy(copies[there].to, copies[there].bytes, 16);
  copies.erase(copies.begin(), copies.begin() + there);
}
inline void grid_wait() {}
inline void grid_launch_dependents() { emulator::current->block->has_released = true; }
inline void look_for_words() { emulator::looks_after_release += emulator::current->block->has_released; }
