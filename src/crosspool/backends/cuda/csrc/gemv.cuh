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

// y = (W (x * norm)) / RMS(x): the scale is a token's own, so it comes last, and no block reads x twice.
template <int WARPS>
DEVICE float norm_scale(const float* squares, int column, int k, float eps) {
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) sum += squares[w * TILE_COLS + column];
  return reciprocal_root(sum * reciprocal(static_cast<float>(k)) + eps);
}

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

// What a warp takes of up to TILE_COLS tokens' x, brought to shared memory at once: registers hold it in several rounds of
// loads only, each as long as the first. NORMS: there they meet a norm's weight, and what the RMS needs is summed.
template <int CHUNKS, bool NORMS>
struct TileColumns {
  static constexpr int ROW = (CHUNKS + 1) * 64;               // bytes of a token; a chunk more, so that tokens lie in other banks
  static constexpr int NORM = NORMS ? CHUNKS * 64 : 0;        // bytes of the norm's weight
  static DEVICE int bytes(int tokens) { return NORM + tokens * ROW; }

  u8* own;    // of this warp: the norm's weight, then tokens
  float* squares;  // of this warp (TILE_COLS)
  int tokens;

  // k positions at and after `k_end` count as zero.
  DEVICE void load_norm(const u16* weight, int k_begin, int k_end) const {
    if constexpr (NORMS) bring(own, weight, 0, 1, k_begin, k_end);
  }
  DEVICE void load(const u16* x, i64 x_stride, int k_begin, int k_end) const {
    bring(own + NORM, x, x_stride, tokens, k_begin, k_end);
    copy_async_commit();
    copy_async_wait<0>();
    warp_sync();
    if constexpr (NORMS) weigh();
  }
  // Tokens times the norm's weight in place, and their sums of squares to `squares` (TILE_COLS).
  DEVICE void weigh() const {
    for (int t = 0; t < tokens; ++t) {
      float sum = 0.0f;
#pragma unroll
      for (int first = 0; first < CHUNKS * 4; first += 32) {
        const int i = first + threadIdx.x % 32;
        if (i >= CHUNKS * 4) continue;
        float v[8], w[8];
        uint4* piece = reinterpret_cast<uint4*>(own + NORM + t * ROW + i * 16);
        unpack8(*piece, v);
        unpack8(load16(own + i * 16), w);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += v[j] * v[j], v[j] *= w[j];
        *piece = uint4{pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
      }
      sum = warp_sum(sum);
      if (threadIdx.x % 32 == 0) squares[t] = sum;
    }
    warp_sync();
  }
  static DEVICE void bring(u8* to, const u16* from, i64 stride, int count, int k_begin, int k_end) {
    constexpr int PIECES = CHUNKS * 4;
    for (int i = threadIdx.x % 32; i < count * PIECES; i += 32) {
      const int k = k_begin + i % PIECES * 8;
      const bool valid = k < k_end;
      copy_async16(to + i / PIECES * ROW + i % PIECES * 16, from + i / PIECES * stride + (valid ? k : 0), valid);
    }
  }
  // This lane's column of a chunk, as the product takes it. Lanes without a token leave shared memory to the others.
  DEVICE uint4 piece(int chunk) const {
    const int lane = threadIdx.x % 32;
    uint4 x = uint4{0, 0, 0, 0};
    if (lane / 4 < tokens) x = load16(own + NORM + lane / 4 * ROW + chunk * 64 + lane % 4 * 16);
    return x;
  }
};

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
  // x: this lane's token, straight from memory: for products in several passes, whose x is in L1.
  DEVICE void multiply(TileSums& acc, const u16* x, int k_begin, int k_end) const {
    const int k_lane = k_begin + (threadIdx.x % 4) * 8;
    uint4 b[CHUNKS];  // all on their way before the first is used; past the end some others, which meet weights of zero
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) b[c] = load16_now(x + min_int(k_lane + c * 32, k_end - 8));
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) acc.add(c, low[c], high[c], b[c]);
  }
  template <class Columns>
  DEVICE void multiply(TileSums& acc, const Columns& columns) const {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) acc.add(c, low[c], high[c], columns.piece(c));
  }
};

// Weights in shared memory, where they take no registers: every thread finds its own pieces `THREADS` pieces apart.
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
  // first: chunks of this warp before these.
  template <class Columns>
  DEVICE void multiply(TileSums& acc, const Columns& columns, int first) const {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
      acc.add(c, load16(pieces + 2 * c * THREADS * 16), load16(pieces + (2 * c + 1) * THREADS * 16), columns.piece(first + c));
  }
};
