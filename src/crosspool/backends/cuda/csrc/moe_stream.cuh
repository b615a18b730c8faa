// What the two steps of the FFN of few tokens share: a warp's stream of weights through its shared memory, and the lists of
// chosen experts.
//
// One block a multiprocessor. A warp streams weights through its own shared memory: every lane copies exactly the bytes
// that it will multiply, STAGES - 1 stages ahead, so there is nothing to synchronise and nothing to hold in registers,
// and the stream does not pause between tiles. NOTE: a block takes more than half of a multiprocessor's shared memory on
// purpose. Blocks of overlapping kernels start as multiprocessors come free; if two of these fit one, half of the
// multiprocessors get two and the other half none.
#pragma once
#include "moe.cuh"

#if (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900) || defined(CROSSPOOL_SMALL_SMEM)
constexpr int UP_STAGES = 3, DOWN_STAGES = 2, FEW_STAGES = 3;  // 163 KiB of shared memory a block at most
#else
constexpr int UP_STAGES = 4, DOWN_STAGES = 4;  // the same: weights of down follow those of gate and up
constexpr int FEW_STAGES = 5;                  // of both where activations take no room in down
#endif
constexpr int MOE_WARPS = 8, MOE_THREADS = MOE_WARPS * 32;
constexpr int UP_CHUNKS = 4;    // a stage: 4 chunks of 32 elements of k a warp
constexpr int DOWN_CHUNKS = 4;  // a warp's unit: 128 elements of k of one expert
constexpr int UP_K = MOE_WARPS * UP_CHUNKS * 32;       // 1,024 elements of k a stage of the block
constexpr int DOWN_K = DOWN_CHUNKS * 32;               // 128: each warp has its own units
constexpr int MAX_GROUPS = 4;                    // groups of 8 tokens
constexpr int OUT_STRIDE = 20;                   // floats a token takes in a warp's sums
constexpr int STAGE_BYTES = 32768;  // of the block's weights
constexpr int COLUMN_BYTES = DOWN_STAGES * 16384;  // eight activations of each unit

// A warp's stages: [stage][chunk][row of the pair][lane] of 16 bytes.
template <int STAGES, int CHUNKS>
struct Stream {
  SharedAddress mine;  // this lane's first 16 bytes

  DEVICE explicit Stream(u8* smem)
      : mine(shared_address(smem + threadIdx.x / 32 * (STAGES * CHUNKS * 1024) + threadIdx.x % 32 * 16)) {}
  DEVICE void step(int& stage) const { stage = stage + 1 == STAGES ? 0 : stage + 1; }
  // All but the last STAGES - 1 groups of copies are there.
  DEVICE void wait() const { copy_async_wait<STAGES - 1>(); }
  // Start copying this lane's part of two rows: chunks at k, k + 32, ...; zeros at and after k_end.
  DEVICE void copy(int stage, const u16* low_row, const u16* high_row, int k, int k_end) const {
    const SharedAddress to = mine + stage * CHUNKS * 1024;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const bool inside = k + c * 32 < k_end;
      copy_streamed16(to + c * 1024, inside ? low_row + k + c * 32 : low_row, inside);
      copy_streamed16(to + c * 1024 + 512, inside ? high_row + k + c * 32 : high_row, inside);
    }
  }
  // The same where all of it lies inside the rows; `low`, `high`: at this lane's first k.
  DEVICE void copy_whole(int stage, const u16* low, const u16* high) const {
    const SharedAddress to = mine + stage * CHUNKS * 1024;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      copy_streamed16(to + c * 1024, low + c * 32);
      copy_streamed16(to + c * 1024 + 512, high + c * 32);
    }
  }
  DEVICE uint4 low(int stage, int c) const { return load16_shared(mine + (stage * CHUNKS + c) * 1024); }
  DEVICE uint4 high(int stage, int c) const { return load16_shared(mine + (stage * CHUNKS + c) * 1024 + 512); }
};

// The chosen experts and their pairs, in shared memory; of each pair its token too. Entries past the number of chosen experts
// mean nothing.
struct Lists {
  int *ids, *offsets, *pairs;

  DEVICE Lists(const MoeParams& p, int* smem) : ids(smem), offsets(ids + p.max_unique), pairs(offsets + p.max_unique + 1) {}
  DEVICE static int entry(int pair, int top_k) { return pair | pair / top_k << 16; }
  DEVICE int pair(int at) const { return pairs[at] & 0xffff; }
  DEVICE int token(int at) const { return pairs[at] >> 16; }
  DEVICE void copy(const MoeParams& p) const {
    for (int i = threadIdx.x; i < p.max_unique; i += MOE_THREADS) ids[i] = p.unique_ids[i];
    for (int i = threadIdx.x; i <= p.max_unique; i += MOE_THREADS) offsets[i] = p.unique_offsets[i];
    for (int i = threadIdx.x; i < p.tokens * p.top_k; i += MOE_THREADS) pairs[i] = entry(p.expert_pairs[i], p.top_k);
  }
};
