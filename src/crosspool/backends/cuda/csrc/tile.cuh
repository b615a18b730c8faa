// The sums of a 16-row tile of a weight matrix times up to 8 columns (tokens), left by every warp for the block.
#pragma once
#include "common.cuh"

constexpr int TILE_ROWS = 16;
constexpr int TILE_COLS = 8;
constexpr int RED_STRIDE = 20;  // floats a column takes in the reduction buffer: no bank conflicts
constexpr int RED_FLOATS = TILE_COLS * RED_STRIDE;

// Leave a warp's 16 x 8 sums where `red` holds them as [column][row].
DEVICE void store_tile(float* red, const float (&acc)[4]) {
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  red[(2 * q) * RED_STRIDE + g] = acc[0];
  red[(2 * q + 1) * RED_STRIDE + g] = acc[1];
  red[(2 * q) * RED_STRIDE + g + 8] = acc[2];
  red[(2 * q + 1) * RED_STRIDE + g + 8] = acc[3];
}

// Sum of all warps' value at (column, row), in warp order.
template <int WARPS>
DEVICE float sum_tile(const float* red, int column, int row) {
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) total += red[w * RED_FLOATS + column * RED_STRIDE + row];
  return total;
}
