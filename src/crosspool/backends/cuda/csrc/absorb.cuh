// A head's query projection and the product that takes its first part to latents, for one token, by a cluster of blocks.
//
// A block makes its part of the head's queries and gives those without positions to the others of its cluster; then each makes
// its part of the head's latents. Both products take their sums in the order of `gemv`, with four warps a tile and with one,
// so that both ways leave the same bits.
#pragma once
#include "gemv.cuh"

struct AbsorbParams {
  const u16* weight;       // (heads * head rows, then other rows; k) bf16
  const u16* x;            // (k) bf16
  const u16* norm_weight;  // (k) bf16, where x is RMS-normalised over k first
  const u16* key_up;       // (heads, ABSORB_LATENTS, nope) bf16
  u16* y;                  // as many as rows, bf16
  u16* q_latent;           // (heads, ABSORB_LATENTS) bf16
  int rows, heads, k;      // rows: of `weight`
  float norm_eps;
};

constexpr int ABSORB_PARTS = 4;  // of k, a warp each
constexpr int ABSORB_LATENTS = 512;

// BLOCKS: of a cluster, a head each; more clusters take what rows are left. TILES: of 16 rows of `weight` that a block takes.
// CHUNKS, HELD: as of `gemv`. NOPE: the first rows of a head, which go to latents.
template <int BLOCKS_, int TILES_, int CHUNKS_, int HELD_, int NOPE_, bool NORMS_>
struct Absorbed {
  static constexpr int BLOCKS = BLOCKS_, TILES = TILES_, CHUNKS = CHUNKS_, HELD = HELD_, NOPE = NOPE_;
  static constexpr bool NORMS = NORMS_;
  static constexpr int WARPS = TILES * ABSORB_PARTS, THREADS = WARPS * 32, ALL = CHUNKS + HELD;
  static constexpr int ROWS = TILES * TILE_ROWS, HEAD = BLOCKS * ROWS;
  static constexpr int UP_WARPS = ABSORB_LATENTS / BLOCKS / TILE_ROWS, UP_THREADS = UP_WARPS * 32;  // a tile of latents each
  static_assert(UP_WARPS <= WARPS && NOPE % 32 == 0 && NOPE <= HEAD, "shape");
};

// Shared memory: warps' sums, then squares; what is held of `weight`, then of key_up; NOPE bf16; each warp's columns.
template <class Shape>
DEVICE void absorb(const AbsorbParams& p) {
  constexpr int WARPS = Shape::WARPS, THREADS = Shape::THREADS, CHUNKS = Shape::CHUNKS, HELD = Shape::HELD, NOPE = Shape::NOPE;
  typedef TileColumns<Shape::ALL, Shape::NORMS> Columns;
  float* red = reinterpret_cast<float*>(dynamic_smem());          // WARPS * RED_FLOATS
  float* squares = red + WARPS * RED_FLOATS;                      // WARPS * TILE_COLS
  u8* held = reinterpret_cast<u8*>(squares + WARPS * TILE_COLS);  // HELD * 2 * THREADS * 16
  u8* held_up = held + HELD * 2 * THREADS * 16;                   // NOPE / 32 * 2 * UP_THREADS * 16
  u16* queries = reinterpret_cast<u16*>(held_up + NOPE / 32 * 2 * Shape::UP_THREADS * 16);  // NOPE
  u8* own = reinterpret_cast<u8*>(queries + NOPE);
  const int part = blockIdx.x, head = blockIdx.y, warp = threadIdx.x / 32, lane_row = threadIdx.x % 32 / 4;
  const int row0 = head * Shape::HEAD + part * Shape::ROWS, k_begin = warp % ABSORB_PARTS * Shape::ALL * 32;
  const bool is_head = head < p.heads, makes_latents = is_head && warp < Shape::UP_WARPS;
  cluster_arrive();
  const int row = row0 + warp / ABSORB_PARTS * TILE_ROWS + lane_row;
  const u16* low = p.weight + static_cast<i64>(min_int(row, p.rows - 1)) * p.k;
  const u16* high = p.weight + static_cast<i64>(min_int(row + 8, p.rows - 1)) * p.k;
  TileWeights<CHUNKS> tile;
  tile.load(low, high, k_begin, p.k);
  const HeldWeights<HELD, THREADS> rest{held + threadIdx.x * 16};
  rest.load(low, high, k_begin + CHUNKS * 32, p.k);
  const HeldWeights<NOPE / 32, Shape::UP_THREADS> up{held_up + threadIdx.x * 16};
  const int latent0 = (part * Shape::UP_WARPS + warp) * TILE_ROWS;
  if (makes_latents) {
    const u16* latent = p.key_up + (static_cast<i64>(head) * ABSORB_LATENTS + latent0 + lane_row) * NOPE;
    up.load(latent, latent + 8 * NOPE, 0, NOPE);
  }
  const Columns columns{own + warp * Columns::bytes(1), squares + warp * TILE_COLS, 1};
  columns.load_norm(p.norm_weight, k_begin, p.k);
  grid_launch_dependents();
  grid_wait();

  columns.load(p.x, 0, k_begin, p.k);
  TileSums sums;
  tile.multiply(sums, columns);
  rest.multiply(sums, columns, CHUNKS);
  sums.store(red + warp * RED_FLOATS);
  block_sync();
  cluster_wait();  // all its blocks have begun
  if (threadIdx.x < Shape::ROWS && row0 + static_cast<int>(threadIdx.x) < p.rows) {
    const int of_tile = threadIdx.x / TILE_ROWS * ABSORB_PARTS, query = part * Shape::ROWS + threadIdx.x;
    float v = sum_tile<ABSORB_PARTS>(red + of_tile * RED_FLOATS, 0, threadIdx.x % TILE_ROWS);
    if constexpr (Shape::NORMS) v *= norm_scale<ABSORB_PARTS>(squares + of_tile * TILE_COLS, 0, p.k, p.norm_eps);
    p.y[row0 + threadIdx.x] = bf16_bits(v);
    if (is_head && query < NOPE)
#pragma unroll
      for (int rank = 0; rank < Shape::BLOCKS; ++rank) store_cluster(queries + query, rank, bf16_bits(v));
  }
  cluster_arrive();
  cluster_wait();
  if (!makes_latents) return;
  TileSums latents;
#pragma unroll
  for (int c = 0; c < NOPE / 32; ++c)  // every column is this token
    latents.add(c, load16(up.pieces + 2 * c * Shape::UP_THREADS * 16), load16(up.pieces + (2 * c + 1) * Shape::UP_THREADS * 16),
                load16(queries + c * 32 + threadIdx.x % 4 * 8));
  latents.store(red + warp * RED_FLOATS);
  warp_sync();
  const int lane = threadIdx.x % 32;
  if (lane < TILE_ROWS)
    p.q_latent[head * ABSORB_LATENTS + latent0 + lane] = bf16_bits(sum_tile<1>(red + warp * RED_FLOATS, 0, lane));
}
