// What the two steps of the FFN of few tokens share: a warp's stream of weights through its shared memory, and the lists of
// chosen experts.
//
// One block a multiprocessor. A warp streams weights through its own shared memory, STAGES - 1 stages ahead, so there is
// nothing to synchronise between warps and nothing to hold in registers, and the stream does not pause between tiles. NOTE: a
// block takes more than half of a multiprocessor's shared memory on purpose. Blocks of overlapping kernels start as
// multiprocessors come free; if two of these fit one, half of the multiprocessors get two and the other half none.
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

// A warp's stages: [stage][line][low or high rows][row][128 bytes], the halves of odd rows' lines swapped so that reads meet no
// bank twice. A copy of the warp takes whole lines of four rows: half lines of eight are twice as many requests. So lanes copy
// for each other, each time behind a `warp_sync`: what a stage held has been read by all lanes then.
template <int STAGES, int CHUNKS>
struct Stream {
  SharedAddress to, even, odd;  // where this lane copies its first 16 bytes; what it multiplies of even and odd chunks

  DEVICE explicit Stream(u8* smem) {
    const SharedAddress first = shared_address(smem + threadIdx.x / 32 * (STAGES * CHUNKS * 1024));
    const int row = copy_row(), g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    to = first + row * 128 + (threadIdx.x % 8 * 16 ^ row % 2 * 64);
    even = first + g * 128 + q * 16 + g % 2 * 64;
    odd = first + g * 128 + q * 16 + (1 - g % 2) * 64;
  }
  // What this lane copies: of a row and the fourth behind it, from this element of k on.
  DEVICE static int copy_row() { return threadIdx.x % 32 / 8; }
  DEVICE static int copy_k() { return threadIdx.x % 8 * 8; }
  DEVICE void step(int& stage) const { stage = stage + 1 == STAGES ? 0 : stage + 1; }
  // All but the last STAGES - 1 groups of copies are there.
  DEVICE void wait() const {
    copy_async_wait<STAGES - 1>();
    warp_sync();
  }
  // Start copying this lane's part of low and high rows; `low`, `high`: at `k` of its first ones, to the fourth behind them it
  // is `fourth` elements; zeros at and after k_end.
  DEVICE void copy(int stage, const u16* low, const u16* high, int fourth, int k, int k_end) const {
    warp_sync();
    const SharedAddress at = to + stage * CHUNKS * 1024;
#pragma unroll
    for (int line = 0; line < CHUNKS / 2; ++line) {
      const bool inside = k + line * 64 < k_end;
      const int by = inside ? line * 64 : -k;
      copy_streamed16(at + line * 2048, low + by, inside);
      copy_streamed16(at + line * 2048 + 512, low + fourth + by, inside);
      copy_streamed16(at + line * 2048 + 1024, high + by, inside);
      copy_streamed16(at + line * 2048 + 1536, high + fourth + by, inside);
    }
  }
  // The same where all of it lies inside the rows.
  DEVICE void copy_whole(int stage, const u16* low, const u16* high, int fourth) const {
    warp_sync();
    const SharedAddress at = to + stage * CHUNKS * 1024;
    const u16 *low_fourth = low + fourth, *high_fourth = high + fourth;
#pragma unroll
    for (int line = 0; line < CHUNKS / 2; ++line) {
      copy_streamed16(at + line * 2048, low + line * 64);
      copy_streamed16(at + line * 2048 + 512, low_fourth + line * 64);
      copy_streamed16(at + line * 2048 + 1024, high + line * 64);
      copy_streamed16(at + line * 2048 + 1536, high_fourth + line * 64);
    }
  }
  // This lane's part of a chunk.
  DEVICE uint4 low(int stage, int c) const { return load16_shared((c % 2 ? odd : even) + (stage * CHUNKS + c / 2 * 2) * 1024); }
  DEVICE uint4 high(int stage, int c) const {
    return load16_shared((c % 2 ? odd : even) + (stage * CHUNKS + c / 2 * 2) * 1024 + 1024);
  }
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
