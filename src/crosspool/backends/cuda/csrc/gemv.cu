// Skinny matrix products: one block per 16 rows, the warps of a block share k. Weights do not depend on the kernel
// before, so all that registers and shared memory hold of them is on its way before waiting for it.
#include "absorb.cuh"

// HELD: chunks of a warp that wait in shared memory, each thread's own pieces beside each other's. With them, or with a norm
// before the product, k fits one pass.
template <int WARPS, int CHUNKS, int HELD, bool NORMS>
DEVICE void gemv_body(const GemvParams& p) {
  constexpr int THREADS = WARPS * 32, ALL = CHUNKS + HELD, PASS = WARPS * ALL * 32;
  constexpr int EACH = (TILE_ROWS * TILE_COLS + THREADS - 1) / THREADS;  // results of a thread
  typedef TileColumns<ALL, NORMS> Columns;
  float* red = reinterpret_cast<float*>(dynamic_smem());            // WARPS * RED_FLOATS
  float* squares = red + WARPS * RED_FLOATS;                        // WARPS * TILE_COLS
  u8* held = reinterpret_cast<u8*>(squares + WARPS * TILE_COLS);    // HELD * 2 * THREADS * 16, then each warp's columns
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  const int row0 = blockIdx.x * TILE_ROWS;
  const i64 group = blockIdx.y;
  const u16* weight = p.weight + group * p.weight_group_stride;
  const u16* low_row = weight + static_cast<i64>(min_int(row0 + g, p.rows - 1)) * p.k;
  const u16* high_row = weight + static_cast<i64>(min_int(row0 + g + 8, p.rows - 1)) * p.k;
  const u16* x = p.x + group * p.x_group_stride;
  const int warp_begin = warp * ALL * 32;

  TileWeights<CHUNKS> tile;
  tile.load(low_row, high_row, warp_begin, p.k);
  const HeldWeights<HELD, THREADS> rest{held + threadIdx.x * 16};
  rest.load(low_row, high_row, warp_begin + CHUNKS * 32, p.k);
  Columns columns{held + HELD * 2 * THREADS * 16 + warp * Columns::bytes(min_int(p.tokens, TILE_COLS)),
                  squares + warp * TILE_COLS, 0};
  columns.load_norm(p.norm_weight, warp_begin, p.k);
  grid_launch_dependents();
  grid_wait();

  for (int t0 = 0; t0 < p.tokens; t0 += TILE_COLS) {
    TileSums acc;
    float carried[EACH];  // on its way while products are made
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int i = threadIdx.x + n * THREADS, t = t0 + i / TILE_ROWS, row = row0 + i % TILE_ROWS;
      carried[n] = 0.0f;
      if (p.residual != nullptr && i < TILE_ROWS * TILE_COLS && t < p.tokens && row < p.rows)
        carried[n] = p.residual[static_cast<i64>(t) * p.rows + row];
    }
    if constexpr (HELD > 0 || NORMS) {
      columns.tokens = min_int(p.tokens - t0, TILE_COLS);
      columns.load(x + t0 * p.x_stride, p.x_stride, warp_begin, p.k);
      tile.multiply(acc, columns);
      rest.multiply(acc, columns, CHUNKS);
    } else {
      const u16* column = x + min_int(t0 + g, p.tokens - 1) * p.x_stride;
      for (int pass = 0; pass * PASS < p.k; ++pass) {
        const int k_begin = pass * PASS + warp_begin;
        if (pass > 0 || (t0 > 0 && PASS < p.k)) tile.load(low_row, high_row, k_begin, p.k);
        tile.multiply(acc, column, k_begin, p.k);
      }
    }
    acc.store(red + warp * RED_FLOATS);
    block_sync();
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int i = threadIdx.x + n * THREADS, t = t0 + i / TILE_ROWS, row = row0 + i % TILE_ROWS;
      if (i >= TILE_ROWS * TILE_COLS || t >= p.tokens || row >= p.rows) continue;
      float v = sum_tile<WARPS>(red, i / TILE_ROWS, i % TILE_ROWS);
      if (NORMS) v *= norm_scale<WARPS>(squares, i / TILE_ROWS, p.k, p.norm_eps);
      if (p.bias != nullptr) v += bf16_value(p.bias[row]);
      v += carried[n];
      const i64 to = t * p.y_stride + group * p.y_group_stride + row;
      if (p.y_is_float) static_cast<float*>(p.y)[to] = v;
      else static_cast<u16*>(p.y)[to] = bf16_bits(v);
    }
    block_sync();
  }
}

// Names say warps, and chunks of 32 elements a warp takes of k in one pass: in registers, then in shared memory.
#define GEMV(warps, chunks, min_blocks)                                                                      \
  KERNEL(gemv_w##warps##_c##chunks, GemvParams, warps * 32, min_blocks) { gemv_body<warps, chunks, 0, false>(p); } \
  KERNEL(gemv_w##warps##_c##chunks##_norm, GemvParams, warps * 32, min_blocks) { gemv_body<warps, chunks, 0, true>(p); }
#define HELD_GEMV(warps, chunks, held, min_blocks) \
  KERNEL(gemv_w##warps##_c##chunks##_s##held, GemvParams, warps * 32, min_blocks) { gemv_body<warps, chunks, held, false>(p); }

GEMV(1, 4, 20)
GEMV(1, 6, 16)
GEMV(4, 2, 1)
GEMV(4, 4, 1)
GEMV(4, 6, 5)
GEMV(8, 4, 1)
GEMV(16, 4, 2)
GEMV(16, 8, 1)
GEMV(16, 10, 1)
HELD_GEMV(4, 8, 8, 4)
HELD_GEMV(8, 2, 6, 4)
HELD_GEMV(8, 4, 4, 3)
HELD_GEMV(8, 2, 14, 1)
HELD_GEMV(8, 2, 18, 1)
HELD_GEMV(8, 6, 14, 1)

// A head's queries and their latents: clusters along x; along y heads, then what rows are left. Names say k and NOPE.
#define ABSORB(name, Shape, min_blocks) \
  CLUSTER_KERNEL(name, AbsorbParams, Shape::THREADS, min_blocks, Shape::BLOCKS) { absorb<Shape>(p); }

typedef Absorbed<8, 2, 6, 0, 192, true> AbsorbedFromLora;
typedef Absorbed<4, 3, 8, 8, 128, false> AbsorbedFromHidden;
ABSORB(absorb_k768_n192, AbsorbedFromLora, 3)
ABSORB(absorb_k2048_n128, AbsorbedFromHidden, 1)
