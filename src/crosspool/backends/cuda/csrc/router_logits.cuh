// A router's logits: rows of its weight, or tiles of rows and tokens, times the rows of the batch, in one order of sums.
#pragma once
#include "router_params.cuh"

// One row of the router's weight, the block's threads side by side, and its products with every token.
struct RouterRow {
  static constexpr int STEP = ROUTER_THREADS * 4, AT_ONCE = 4;
  const float* weight;
  float4 held[HELD];

  DEVICE RouterRow(const RouterParams& p, int row) : weight(p.weight + static_cast<i64>(row) * p.hidden) {
#pragma unroll
    for (int c = 0; c < HELD; ++c) {
      const int i = c * STEP + threadIdx.x * 4;
      held[c] = i < p.hidden ? load_float4(weight + i) : float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
  }
  static DEVICE float product(float4 w, uint2 v) {
    return w.x * bf16_low(v.x) + w.y * bf16_high(v.x) + w.z * bf16_low(v.y) + w.w * bf16_high(v.y);
  }
  // This thread's pieces of tokens from t0 on; zeros where there are none.
  static DEVICE void load(const RouterParams& p, int t0, uint2 (&to)[AT_ONCE][HELD]) {
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n)
#pragma unroll
      for (int c = 0; c < HELD; ++c) {
        const int i = c * STEP + threadIdx.x * 4;
        to[n][c] = uint2{0, 0};
        if (t0 + n < p.tokens && i < p.hidden) to[n][c] = load8(p.x + static_cast<i64>(t0 + n) * p.hidden + i);
      }
  }
  // Products of elements that are not held: of longer rows than usual.
  DEVICE void add_beyond(const RouterParams& p, int t0, float (&sum)[AT_ONCE]) const {
#pragma unroll 1
    for (int i = HELD * STEP + threadIdx.x * 4; i < p.hidden; i += STEP) {
      const float4 w = load_float4(weight + i);
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n)
        if (t0 + n < p.tokens) sum[n] += product(w, load8(p.x + static_cast<i64>(t0 + n) * p.hidden + i));
    }
  }
  // The row's logit of every token (or the shared expert's scale) to device memory: `put(token, logit)`.
  template <class Put>
  DEVICE void logits(const RouterParams& p, int row, float* sums, const Put& put) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint2 coming[AT_ONCE][HELD];
    load(p, 0, coming);
#pragma unroll 1
    for (int t0 = 0; t0 < p.tokens; t0 += AT_ONCE) {
      float sum[AT_ONCE];
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n) {
        sum[n] = 0.0f;
#pragma unroll
        for (int c = 0; c < HELD; ++c) sum[n] += product(held[c], coming[n][c]);
      }
      if (p.hidden > HELD * STEP) add_beyond(p, t0, sum);
      if (t0 + AT_ONCE < p.tokens) load(p, t0 + AT_ONCE, coming);
#pragma unroll
      for (int mask = 16; mask; mask >>= 1)
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) sum[n] += shfl_xor(sum[n], mask);
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n)
        if (lane == n && t0 + n < p.tokens) sums[(t0 + n) * ROUTER_WARPS + warp] = sum[n];
    }
    block_sync();
#pragma unroll 1
    for (int t = threadIdx.x; t < p.tokens; t += ROUTER_THREADS) {
      float sum = 0.0f;
      for (int w = 0; w < ROUTER_WARPS; ++w) sum += sums[t * ROUTER_WARPS + w];
      if (row < p.experts) put(t, sum);
      else p.shared_scale[t] = 1.0f / (1.0f + exp_full(-sum));
    }
    block_sync();
  }
};

// Several rows of the router's weight and a part of many tokens: every block would else read all of them. A logit's sum has the
// same order as `RouterRow` gives it.
struct RouterTile {
  static constexpr int ROWS = 4, AT_ONCE = 4, PIECES = 2, STEP = ROUTER_THREADS * 4;
  const RouterParams& p;
  const int rows, row0, begin, end;  // of the router, and this tile's first; tokens

  // How many tiles there are over one group of rows, where `blocks` share the work.
  static DEVICE int num_groups(int tokens, int rows, int blocks) {
    return max_int(1, min_int(ceil_div(tokens, AT_ONCE), blocks / ceil_div(rows, ROWS)));
  }
  static DEVICE int num_tiles(int tokens, int rows, int blocks) {
    return ceil_div(rows, ROWS) * num_groups(tokens, rows, blocks);
  }
  static DEVICE RouterTile at(const RouterParams& p, int rows, int tile, int blocks) {
    const int groups = num_groups(p.tokens, rows, blocks), each = ceil_div(p.tokens, groups), group = tile % groups;
    return RouterTile{p, rows, tile / groups * ROWS, min_int(group * each, p.tokens), min_int((group + 1) * each, p.tokens)};
  }
  // `put(token, row, logit)`; sums: ROWS * MAX_TOKENS * ROUTER_WARPS.
  template <class Put>
  DEVICE void logits(float* sums, const Put& put) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int t0 = begin; t0 < end; t0 += AT_ONCE) {
      float sum[ROWS][AT_ONCE] = {};
#pragma unroll 1
      for (int i0 = threadIdx.x * 4; i0 < p.hidden; i0 += PIECES * STEP) {
        float4 w[ROWS][PIECES];
        uint2 x[AT_ONCE][PIECES];
#pragma unroll
        for (int c = 0; c < PIECES; ++c) {
          const int i = i0 + c * STEP;
#pragma unroll
          for (int n = 0; n < AT_ONCE; ++n) {
            x[n][c] = uint2{0, 0};
            if (t0 + n < end && i < p.hidden) x[n][c] = load8(p.x + static_cast<i64>(t0 + n) * p.hidden + i);
          }
#pragma unroll
          for (int r = 0; r < ROWS; ++r) {
            w[r][c] = float4{0.0f, 0.0f, 0.0f, 0.0f};
            if (row0 + r < rows && i < p.hidden) w[r][c] = load_float4(p.weight + static_cast<i64>(row0 + r) * p.hidden + i);
          }
        }
#pragma unroll
        for (int c = 0; c < PIECES; ++c)
#pragma unroll
          for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) sum[r][n] += RouterRow::product(w[r][c], x[n][c]);
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) sum[r][n] = warp_sum(sum[r][n]);
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n)
          if (lane == r * AT_ONCE + n && t0 + n < end) sums[((t0 + n - begin) * ROWS + r) * ROUTER_WARPS + warp] = sum[r][n];
    }
    block_sync();
#pragma unroll 1
    for (int i = threadIdx.x; i < (end - begin) * ROWS; i += ROUTER_THREADS) {
      const int t = begin + i / ROWS, row = row0 + i % ROWS;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < ROUTER_WARPS; ++w) sum += sums[i * ROUTER_WARPS + w];
      if (row < p.experts) put(t, row, sum);
      else if (row < rows) p.shared_scale[t] = 1.0f / (1.0f + exp_full(-sum));
    }
    block_sync();
  }
};
