// A 16-row tile of a weight matrix times up to 8 columns (tokens) at a time on tensor cores, straight from global memory.
//
// Lane l of a warp (g = l / 4, q = l % 4) reads 16 contiguous bytes of rows g and g + 8: eight elements of k, at
// 8q of each 32-element chunk. The matrix instruction pairs positions of k, not values, so reading both operands
// in this order needs no shuffle. All loads of a warp are issued before the first product.
#pragma once
#include "common.cuh"

constexpr int TILE_ROWS = 16;
constexpr int TILE_COLS = 8;
constexpr int RED_STRIDE = 20;  // floats a column takes in the reduction buffer: no bank conflicts
constexpr int RED_FLOATS = TILE_COLS * RED_STRIDE;

template <int CHUNKS>
struct TileWeights {
  uint4 low[CHUNKS], high[CHUNKS];

  // `low_row`, `high_row`: this lane's two rows. k positions at and after `k_end` count as zero.
  DEVICE void load(const u16* low_row, const u16* high_row, int k_begin, int k_end) {
    const int k_lane = k_begin + (threadIdx.x % 4) * 8;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int k = k_lane + c * 32;
      if (k < k_end) {
        low[c] = load_stream(low_row + k);
        high[c] = load_stream(high_row + k);
      } else {
        low[c] = high[c] = uint4{0, 0, 0, 0};
      }
    }
  }

  // `column`: this lane's column (token g) of the other operand, or null for a column of zeros.
  DEVICE void multiply(float (&acc)[4], const u16* column, int k_begin, int k_end) const {
    const int k_lane = k_begin + (threadIdx.x % 4) * 8;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int k = k_lane + c * 32;
      uint4 b = uint4{0, 0, 0, 0};
      if (column != nullptr && k < k_end) b = load16(column + k);
      mma_bf16(acc, low[c].x, high[c].x, low[c].y, high[c].y, b.x, b.y);
      mma_bf16(acc, low[c].z, high[c].z, low[c].w, high[c].w, b.z, b.w);
    }
  }
};

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
