// y[t, group, r] = sum_k weight[group, r, k] * x[t, group, k] (+ bias[r]) (+ residual[t, r]), for few tokens t, on tensor cores,
// a 16-row tile of a weight matrix at a time.
//
// Lane l of a warp (g = l / 4, q = l % 4) reads 16 contiguous bytes of rows g and g + 8: eight elements of k, at
// 8q of each 32-element chunk. The matrix instruction pairs positions of k, not values, so reading both operands
// in this order needs no shuffle. All loads of a warp are issued before the first product.
#pragma once
#include "tile.cuh"

struct GemvParams {
  const u16* weight;       // (groups, rows, k) bf16
  const u16* x;            // (tokens, x_stride) bf16
  const u16* norm_weight;  // (k) bf16 or null: x is RMS-normalised over k first
  const u16* bias;         // (rows) bf16 or null
  const float* residual;   // (tokens, rows) fp32 or null
  void* y;                 // (tokens, y_stride) bf16, or fp32 where y_is_float
  i64 weight_group_stride, x_group_stride, y_group_stride;  // elements
  i64 x_stride, y_stride;                                   // elements
  int rows, k, tokens, y_is_float;
  float norm_eps;
};

DEVICE void unpack8(uint4 from, float (&to)[8]) {
  to[0] = bf16_low(from.x), to[1] = bf16_high(from.x), to[2] = bf16_low(from.y), to[3] = bf16_high(from.y);
  to[4] = bf16_low(from.z), to[5] = bf16_high(from.z), to[6] = bf16_low(from.w), to[7] = bf16_high(from.w);
}

// A warp's 16 x 8 sums, as four chains of products that do not wait for each other.
struct TileSums {
  float chain[4][4];

  DEVICE TileSums() {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) chain[i][j] = 0.0f;
  }
  // One chunk of 32 elements of k.
  DEVICE void add(int chunk, uint4 low, uint4 high, uint4 b) {
    mma_bf16(chain[chunk % 2 * 2], low.x, high.x, low.y, high.y, b.x, b.y);
    mma_bf16(chain[chunk % 2 * 2 + 1], low.z, high.z, low.w, high.w, b.z, b.w);
  }
  DEVICE void store(float* red) const {
    float sum[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] = (chain[0][j] + chain[1][j]) + (chain[2][j] + chain[3][j]);
    store_tile(red, sum);
  }
};

// This lane's column of the other operand. NORMS: times a weight, and what the RMS needs is summed on the way.
// NOTE: a lane whose token is not there reads another's column: nobody takes that sum.
template <bool NORMS>
struct TileColumn {
  const u16* x;
  float squares;

  // Eight elements from `k` on; past the end some others, which meet weights of zero.
  DEVICE uint4 piece(int k, int k_end) const { return load16_now(x + min_int(k, k_end - 8)); }
  // A piece as the product takes it. `norm`: of these elements; zeros past the end.
  DEVICE uint4 scaled(uint4 piece, uint4 norm, bool counts) {
    float v[8], w[8];
    unpack8(piece, v);
    unpack8(norm, w);
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += counts ? v[i] * v[i] : 0.0f, v[i] *= w[i];
    return uint4{pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
  }
  // A warp's part of every column's sum of squares to `to` (TILE_COLS).
  DEVICE void leave_squares(float* to) const {
    float sum = squares + shfl_xor(squares, 1);
    sum += shfl_xor(sum, 2);
    if (threadIdx.x % 4 == 0) to[threadIdx.x % 32 / 4] = sum;
  }
};

template <int CHUNKS, bool NORMS>
struct TileWeights {
  uint4 low[CHUNKS], high[CHUNKS], norm[NORMS ? CHUNKS : 1];

  // `low_row`, `high_row`: this lane's two rows. k positions at and after `k_end` count as zero.
  DEVICE void load(const u16* low_row, const u16* high_row, const u16* norm_weight, int k_begin, int k_end) {
    const int k_lane = k_begin + (threadIdx.x % 4) * 8;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int k = k_lane + c * 32;
      if (k < k_end) {
        low[c] = load_stream(low_row + k);
        high[c] = load_stream(high_row + k);
        if constexpr (NORMS) norm[c] = load16_now(norm_weight + k);
      } else {
        low[c] = high[c] = uint4{0, 0, 0, 0};
        if constexpr (NORMS) norm[c] = uint4{0, 0, 0, 0};
      }
    }
  }
  DEVICE void multiply(TileSums& acc, TileColumn<NORMS>& column, int k_begin, int k_end) const {
    const int k_lane = k_begin + (threadIdx.x % 4) * 8;
    uint4 b[CHUNKS];  // all on their way before the first is used
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) b[c] = column.piece(k_lane + c * 32, k_end);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      if constexpr (NORMS) b[c] = column.scaled(b[c], norm[c], k_lane + c * 32 < k_end);
      acc.add(c, low[c], high[c], b[c]);
    }
  }
};

// The same in shared memory, where it takes no registers: every thread finds its own pieces `THREADS` pieces apart.
template <int CHUNKS, int THREADS>
struct HeldWeights {
  u8* pieces;  // of this thread

  DEVICE void load(const u16* low_row, const u16* high_row, int k_begin, int k_end) const {
    const int k_lane = k_begin + (threadIdx.x % 4) * 8;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int k = k_lane + c * 32;
      const bool valid = k < k_end;
      copy_async16(pieces + 2 * c * THREADS * 16, low_row + (valid ? k : 0), valid);
      copy_async16(pieces + (2 * c + 1) * THREADS * 16, high_row + (valid ? k : 0), valid);
    }
    if (CHUNKS > 0) copy_async_commit();
  }
  DEVICE void wait() const {
    if (CHUNKS > 0) copy_async_wait<0>();
  }
  DEVICE void multiply(TileSums& acc, const TileColumn<false>& column, int k_begin, int k_end) const {
    constexpr int AT_ONCE = 4;
    const int k_lane = k_begin + (threadIdx.x % 4) * 8;
#pragma unroll
    for (int first = 0; first < CHUNKS; first += AT_ONCE) {
      uint4 b[AT_ONCE];
#pragma unroll
      for (int c = 0; c < AT_ONCE; ++c)
        if (first + c < CHUNKS) b[c] = column.piece(k_lane + (first + c) * 32, k_end);
#pragma unroll
      for (int c = first; c < first + AT_ONCE && c < CHUNKS; ++c)
        acc.add(c, load16(pieces + 2 * c * THREADS * 16), load16(pieces + (2 * c + 1) * THREADS * 16), b[c - first]);
    }
  }
};
