// The merge of a head's splits and the product that takes its latents up to values, by a cluster of blocks.
//
// A block merges 128 latents and gives them to the others of its cluster; then each makes a quarter of the head's values.
// Sums are taken in the order of `gemv` with four warps a tile, so that both ways leave the same bits.
#pragma once
#include "combine.cuh"
#include "gemv.cuh"

struct CombineUpParams {
  CombineParams merge;  // its `out` is not used
  const u16* weight;    // (heads, rows, UP_LATENTS) bf16
  u16* y;               // (tokens, heads, rows) bf16
  int rows;
};

constexpr int UP_BLOCKS = 4;
constexpr int UP_LATENTS = UP_BLOCKS * COMBINE_VALUES;
constexpr int UP_PARTS = 4;   // of k, a warp each
constexpr int UP_CHUNKS = UP_LATENTS / 32 / UP_PARTS;
constexpr int UP_GROUPS = COMBINE_WARPS / UP_PARTS;  // tiles at once

// TILES: of 16 rows, that a group of UP_PARTS warps takes: rows are UP_BLOCKS * UP_GROUPS * TILES * 16.
// Shared memory: COMBINE_SMEM, then UP_LATENTS bf16, then COMBINE_WARPS * TILES * RED_FLOATS floats.
template <int TILES>
DEVICE void combine_up(const CombineUpParams& p) {
  constexpr int ROWS = UP_GROUPS * TILES * TILE_ROWS;  // of this block
  u16* latents = reinterpret_cast<u16*>(dynamic_smem() + COMBINE_SMEM);
  float* red = reinterpret_cast<float*>(latents + UP_LATENTS);
  const i64 token = blockIdx.z;
  const int part = blockIdx.x, head = blockIdx.y, warp = threadIdx.x / 32, quarter = warp % UP_PARTS;
  cluster_arrive();
  TileWeights<UP_CHUNKS> weights[TILES];
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int row = part * ROWS + (warp / UP_PARTS * TILES + i) * TILE_ROWS + static_cast<int>(threadIdx.x) % 32 / 4;
    const u16* low = p.weight + (static_cast<i64>(head) * p.rows + row) * UP_LATENTS;
    weights[i].load(low, low + 8 * UP_LATENTS, quarter * COMBINE_VALUES, UP_LATENTS);
  }
  const float value = MergedSplits<GROUPS_HERE>(p.merge, token, head, part * COMBINE_VALUES).value(p.merge, dynamic_smem());
  cluster_wait();  // all its blocks have begun
  if (threadIdx.x < COMBINE_VALUES)
#pragma unroll
    for (int rank = 0; rank < UP_BLOCKS; ++rank)
      store_cluster(latents + part * COMBINE_VALUES + threadIdx.x, rank, bf16_bits(value));
  cluster_arrive();
  cluster_wait();
  TileSums sums[TILES];
#pragma unroll
  for (int c = 0; c < UP_CHUNKS; ++c) {
    const uint4 x = load16(latents + quarter * COMBINE_VALUES + c * 32 + threadIdx.x % 4 * 8);  // every column is this token
#pragma unroll
    for (int i = 0; i < TILES; ++i) sums[i].add(c, weights[i].low[c], weights[i].high[c], x);
  }
#pragma unroll
  for (int i = 0; i < TILES; ++i) sums[i].store(red + ((warp / UP_PARTS * TILES + i) * UP_PARTS + quarter) * RED_FLOATS);
  block_sync();
  if (threadIdx.x >= ROWS) return;
  const float sum = sum_tile<UP_PARTS>(red + threadIdx.x / TILE_ROWS * UP_PARTS * RED_FLOATS, 0, threadIdx.x % TILE_ROWS);
  p.y[(token * p.merge.heads + head) * p.rows + part * ROWS + threadIdx.x] = bf16_bits(sum);
}
