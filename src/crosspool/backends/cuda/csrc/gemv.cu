// Skinny matrix products: one block per 16 rows, the warps of a block share k. Weights do not depend on the kernel
// before, so the first loads are issued before waiting for it.
#include "gemv.cuh"

DEVICE float input_value(const GemvParams& p, i64 at) {
  return p.x_is_float ? static_cast<const float*>(p.x)[at] : bf16_value(static_cast<const u16*>(p.x)[at]);
}

// Normalised rows of x to shared memory, (tokens, k + 8) bf16: the padding spreads rows over the banks.
template <int THREADS>
DEVICE void stage_normalised(const GemvParams& p, i64 x_group, u16* staged, float* scratch) {
  for (int t = 0; t < p.tokens; ++t) {
    const i64 row = t * p.x_stride + x_group;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < p.k; i += THREADS) {
      const float v = input_value(p, row + i);
      squares += v * v;
    }
    const float scale = rsqrt_full(block_sum(squares, scratch, THREADS) / static_cast<float>(p.k) + p.norm_eps);
    for (int i = threadIdx.x; i < p.k; i += THREADS)
      staged[t * (p.k + 8) + i] = bf16_bits(input_value(p, row + i) * scale * bf16_value(p.norm_weight[i]));
  }
  block_sync();
}

template <int WARPS, int CHUNKS>
DEVICE void gemv_body(const GemvParams& p) {
  constexpr int THREADS = WARPS * 32;
  float* red = reinterpret_cast<float*>(dynamic_smem());            // WARPS * RED_FLOATS
  float* scratch = red + WARPS * RED_FLOATS;                        // 32
  u16* staged = reinterpret_cast<u16*>(scratch + 32);               // tokens * (k + 8), with a norm only
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  const int row0 = blockIdx.x * TILE_ROWS;
  const i64 group = blockIdx.y;
  const u16* weight = p.weight + group * p.weight_group_stride;
  const u16* low_row = weight + static_cast<i64>(min_int(row0 + g, p.rows - 1)) * p.k;
  const u16* high_row = weight + static_cast<i64>(min_int(row0 + g + 8, p.rows - 1)) * p.k;
  const i64 x_group = group * p.x_group_stride;
  constexpr int PASS = WARPS * CHUNKS * 32;

  TileWeights<CHUNKS> tile;
  tile.load(low_row, high_row, warp * CHUNKS * 32, p.k);
  grid_launch_dependents();
  grid_wait();
  if (p.norm_weight != nullptr) stage_normalised<THREADS>(p, x_group, staged, scratch);

  for (int t0 = 0; t0 < p.tokens; t0 += TILE_COLS) {
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const u16* column = nullptr;
    if (t0 + g < p.tokens)
      column = p.norm_weight != nullptr ? staged + (t0 + g) * (p.k + 8)
                                        : static_cast<const u16*>(p.x) + (t0 + g) * p.x_stride + x_group;
    for (int pass = 0; pass * PASS < p.k; ++pass) {
      const int k_begin = pass * PASS + warp * CHUNKS * 32;
      if (pass > 0 || (t0 > 0 && PASS < p.k)) tile.load(low_row, high_row, k_begin, p.k);
      tile.multiply(acc, column, k_begin, p.k);
    }
    store_tile(red + warp * RED_FLOATS, acc);
    block_sync();
    for (int i = threadIdx.x; i < TILE_ROWS * TILE_COLS; i += THREADS) {
      const int t = t0 + i / TILE_ROWS, row = row0 + i % TILE_ROWS;
      if (t >= p.tokens || row >= p.rows) continue;
      float v = sum_tile<WARPS>(red, i / TILE_ROWS, i % TILE_ROWS);
      if (p.bias != nullptr) v += bf16_value(p.bias[row]);
      if (p.residual != nullptr) v += p.residual[static_cast<i64>(t) * p.rows + row];
      const i64 at = t * p.y_stride + group * p.y_group_stride + row;
      if (p.y_is_float) static_cast<float*>(p.y)[at] = v;
      else static_cast<u16*>(p.y)[at] = bf16_bits(v);
    }
    block_sync();
  }
}

// Names say warps and chunks of 32 elements a warp takes of k in one pass.
KERNEL(gemv_w4_c2, GemvParams, 128, 1) { gemv_body<4, 2>(p); }
KERNEL(gemv_w4_c4, GemvParams, 128, 1) { gemv_body<4, 4>(p); }
KERNEL(gemv_w4_c6, GemvParams, 128, 1) { gemv_body<4, 6>(p); }
KERNEL(gemv_w8_c4, GemvParams, 256, 1) { gemv_body<8, 4>(p); }
KERNEL(gemv_w8_c8, GemvParams, 256, 2) { gemv_body<8, 8>(p); }
KERNEL(gemv_w16_c4, GemvParams, 512, 2) { gemv_body<16, 4>(p); }
KERNEL(gemv_w16_c8, GemvParams, 512, 1) { gemv_body<16, 8>(p); }
KERNEL(gemv_w16_c10, GemvParams, 512, 1) { gemv_body<16, 10>(p); }
