// The FFN of few tokens on Hopper and later: the same two steps as moe.cu, each one block per multiprocessor that
// streams its tiles' weights through a ring of shared memory. The rings of both kernels fit one multiprocessor, so the
// second fills its ring while the first still computes.
#include "moe.cuh"
#include "ring.cuh"

constexpr int UP_STAGES = 3, UP_K = 1024;    // elements of k a stage
constexpr int DOWN_STAGES = 4, DOWN_K = 768;
constexpr int MAX_COLS = 4;                  // groups of 8 tokens
constexpr int OUT_STRIDE = 20;               // floats a token takes in a warp's sums

// The chosen experts and their pairs, copied to shared memory by `threads` threads of which this is number `thread`.
struct Lists {
  int *ids, *offsets, *pairs;
  DEVICE Lists(const MoeParams& p, int* smem, int experts) : ids(smem), offsets(ids + experts), pairs(offsets + experts + 1) {}
  DEVICE void copy_ids(const MoeParams& p, int thread, int threads, int count) const {
    for (int i = thread; i < count; i += threads) ids[i] = p.unique_ids[i];
  }
  DEVICE void copy_pairs(const MoeParams& p, int thread, int threads, int count) const {
    for (int i = thread; i <= count; i += threads) offsets[i] = p.unique_offsets[i];
    for (int i = thread; i < p.tokens * p.top_k; i += threads) pairs[i] = p.expert_pairs[i];
  }
};

// Products of one stage's chunks with up to MAX_COLS * 8 columns. `row`: this lane's place in the stage.
// `columns[n]`: this lane's column of group n at the stage's first element, or null. `k_end`: elements of the stage.
template <int CHUNKS, int STRIDE>
DEVICE void multiply_stage(float (&acc)[MAX_COLS][4], const uint4 (&first)[CHUNKS], const u8* row, int chunk0, int k_end,
                           const u16* const (&columns)[MAX_COLS], int groups) {
  const int k_lane = threadIdx.x % 4 * 8;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const int k = (chunk0 + c) * 32 + k_lane;
    const bool inside = k < k_end;  // beyond lie leftovers of other stages
    uint4 low = uint4{0, 0, 0, 0}, high = low;
    if (inside) {
      low = load16(row + (chunk0 + c) * 64);
      high = load16(row + (chunk0 + c) * 64 + 8 * STRIDE);
    }
    mma_bf16(acc[0], low.x, high.x, low.y, high.y, first[c].x, first[c].y);
    mma_bf16(acc[0], low.z, high.z, low.w, high.w, first[c].z, first[c].w);
#pragma unroll
    for (int n = 1; n < MAX_COLS; ++n) {
      if (n >= groups) break;
      uint4 b = uint4{0, 0, 0, 0};
      if (columns[n] != nullptr && inside) b = load16(columns[n] + k);
      mma_bf16(acc[n], low.x, high.x, low.y, high.y, b.x, b.y);
      mma_bf16(acc[n], low.z, high.z, low.w, high.w, b.z, b.w);
    }
  }
}

// The first group's columns, loaded before the stage has arrived.
template <int CHUNKS>
DEVICE void load_columns(uint4 (&first)[CHUNKS], const u16* column, int chunk0, int k_end) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const int k = (chunk0 + c) * 32 + threadIdx.x % 4 * 8;
    first[c] = column != nullptr && k < k_end ? load16(column + k) : uint4{0, 0, 0, 0};
  }
}

// Tiles of eight gate and eight up rows: shared experts' first, for their weights are known before the router has ended.
KERNEL(moe_ring_gate_up, MoeParams, RING_THREADS, 1) {
  constexpr int CHUNKS = UP_K / 32 / RING_CONSUMERS;
  using UpRing = Ring<UP_STAGES, UP_K * 2>;
  UpRing ring(dynamic_smem());
  const int groups_max = ceil_div(p.tokens, TILE_COLS);
  float* red = reinterpret_cast<float*>(dynamic_smem() + UpRing::BYTES);  // 2 * RING_CONSUMERS * groups_max tiles
  const int red_floats = RING_CONSUMERS * groups_max * RED_FLOATS;
  const Lists lists(p, reinterpret_cast<int*>(red + 2 * red_floats), p.max_unique);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
  const int shared_tiles = p.shared_width / 8, tiles = p.width / 8, passes = ceil_div(p.hidden, UP_K);
  block_sync();

  if (warp == RING_CONSUMERS) {
    int total = shared_tiles;
    bool waited = false;
    for (int item = blockIdx.x;; item += gridDim.x) {
      if (!waited && item >= shared_tiles) {
        grid_wait();
        waited = true;
        if (p.num_unique != nullptr) {
          const int first = p.unique_ids[min_int(lane, p.max_unique - 1)];  // beside the count, not after it
          const int unique = *p.num_unique;
          total += unique * tiles;
          if (lane < unique) lists.ids[lane] = first;
          lists.copy_ids(p, lane + 32, 32, unique);
          warp_sync();
        }
      }
      if (item >= total) break;
      const u16* row;
      if (item < shared_tiles) {
        row = (lane < 8 ? p.shared_gate : p.shared_up) + static_cast<i64>(item * 8 + lane % 8) * p.hidden;
      } else {
        const int routed = item - shared_tiles;
        const i64 expert = lists.ids[routed / tiles];
        row = p.gate_up + (expert * 2 * p.width + (lane / 8 % 2) * p.width + routed % tiles * 8 + lane % 8) * p.hidden;
      }
      for (int pass = 0; pass < passes; ++pass)
        ring.fill(row + pass * UP_K, min_int(p.hidden - pass * UP_K, UP_K) * 2);
    }
    if (!waited) grid_wait();
    return;
  }

  grid_wait();
  grid_launch_dependents();  // not before the router has ended: the next kernel reads its lists without waiting
  int unique = 0;
  if (p.num_unique != nullptr) {
    unique = *p.num_unique;
    lists.copy_pairs(p, threadIdx.x, RING_CONSUMERS * 32, unique);
    consumer_sync<RING_CONSUMERS * 32>();
  }
  const int total = shared_tiles + unique * tiles;
  for (int item = blockIdx.x, turn = 0; item < total; item += gridDim.x, turn ^= 1) {
    const int routed = item - shared_tiles, u = routed >= 0 ? routed / tiles : 0;
    const int begin = routed >= 0 ? lists.offsets[u] : 0;
    const int* pairs = routed >= 0 ? lists.pairs + begin : nullptr;
    const int count = routed >= 0 ? lists.offsets[u + 1] - begin : p.tokens;
    const int groups = ceil_div(count, TILE_COLS);
    const u16* columns[MAX_COLS];
    float acc[MAX_COLS][4];
#pragma unroll
    for (int n = 0; n < MAX_COLS; ++n) {
      const int at = n * TILE_COLS + g;
      columns[n] = at < count ? p.x + static_cast<i64>(pairs != nullptr ? pairs[at] / p.top_k : at) * p.hidden : nullptr;
      acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
    }
    for (int pass = 0; pass < passes; ++pass) {
      const int k_end = min_int(p.hidden - pass * UP_K, UP_K);
      uint4 first[CHUNKS];
      load_columns<CHUNKS>(first, columns[0], warp * CHUNKS, k_end);
      const u8* row = ring.wait_full();
      multiply_stage<CHUNKS, UpRing::STRIDE>(acc, first, row, warp * CHUNKS, k_end, columns, groups);
      ring.release();
#pragma unroll
      for (int n = 0; n < MAX_COLS; ++n)
        if (columns[n] != nullptr) columns[n] += UP_K;
    }
    float* sums = red + turn * red_floats;
#pragma unroll
    for (int n = 0; n < MAX_COLS; ++n)
      if (n < groups) store_tile(sums + (n * RING_CONSUMERS + warp) * RED_FLOATS, acc[n]);
    consumer_sync<RING_CONSUMERS * 32>();
    const int n = threadIdx.x / 8, i = threadIdx.x % 8;  // 256 threads: 32 columns of 8 values
    if (n < count) {
      const float* tile = sums + n / TILE_COLS * RING_CONSUMERS * RED_FLOATS;
      float gate = sum_tile<RING_CONSUMERS>(tile, n % TILE_COLS, i);
      float up = sum_tile<RING_CONSUMERS>(tile, n % TILE_COLS, i + 8);
      if (pairs != nullptr) {
        const int row = routed % tiles * 8 + i;
        if (p.gate_up_bias != nullptr) {
          const u16* bias = p.gate_up_bias + static_cast<i64>(p.unique_ids[u]) * 2 * p.width + row;
          gate += bf16_value(bias[0]);
          up += bf16_value(bias[p.width]);
        }
        p.act[static_cast<i64>(pairs[n]) * p.width + row] = bf16_bits(activate(p.activation, gate, up));
      } else {
        p.shared_act[static_cast<i64>(n) * p.shared_width + item * 8 + i] = bf16_bits(activate(p.activation, gate, up));
      }
    }
  }
}

// Sixteen rows of the output a block: all units (DOWN_K elements of k of one expert) pass through its ring.
KERNEL(moe_ring_down, MoeParams, RING_THREADS, 1) {
  constexpr int CHUNKS = DOWN_K / 32 / RING_CONSUMERS;
  using DownRing = Ring<DOWN_STAGES, DOWN_K * 2>;
  DownRing ring(dynamic_smem());
  float* sums = reinterpret_cast<float*>(dynamic_smem() + DownRing::BYTES);  // RING_CONSUMERS * tokens * OUT_STRIDE
  float* weights = sums + RING_CONSUMERS * p.tokens * OUT_STRIDE;            // tokens * top_k
  const Lists lists(p, reinterpret_cast<int*>(weights + p.tokens * p.top_k), p.max_unique);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, row0 = blockIdx.x * TILE_ROWS;
  const int shared_units = ceil_div(p.shared_width, DOWN_K), parts = ceil_div(p.width, DOWN_K);
  const int unique = p.num_unique != nullptr ? *p.num_unique : 0, units = shared_units + unique * parts;
  block_sync();
  grid_launch_dependents();

  if (warp == RING_CONSUMERS) {
    lists.copy_ids(p, lane, 32, unique);
    warp_sync();
    const i64 row = min_int(row0 + lane % RING_ROWS, p.hidden - 1);
    for (int unit = 0; unit < units; ++unit) {
      const bool is_shared = unit < shared_units;
      const int width = is_shared ? p.shared_width : p.width;
      const int k0 = (is_shared ? unit : (unit - shared_units) % parts) * DOWN_K;
      const u16* weight = is_shared ? p.shared_down
                                    : p.down + static_cast<i64>(lists.ids[(unit - shared_units) / parts]) * p.hidden * width;
      ring.fill(weight + row * width + k0, min_int(width - k0, DOWN_K) * 2);
    }
    grid_wait();
    return;
  }

  float* out = sums + warp * p.tokens * OUT_STRIDE;
  for (int i = lane; i < p.tokens * OUT_STRIDE; i += 32) out[i] = 0.0f;
  lists.copy_pairs(p, threadIdx.x, RING_CONSUMERS * 32, p.num_unique != nullptr ? unique : -1);
  if (p.num_unique != nullptr)
    for (int i = threadIdx.x; i < p.tokens * p.top_k; i += RING_CONSUMERS * 32) weights[i] = p.topk_weights[i];
  consumer_sync<RING_CONSUMERS * 32>();
  grid_wait();
  for (int unit = 0; unit < units; ++unit) {
    const bool is_shared = unit < shared_units;
    const int u = is_shared ? 0 : (unit - shared_units) / parts, width = is_shared ? p.shared_width : p.width;
    const int k0 = (is_shared ? unit : (unit - shared_units) % parts) * DOWN_K, k_end = min_int(width - k0, DOWN_K);
    const int begin = is_shared ? 0 : lists.offsets[u], count = is_shared ? p.tokens : lists.offsets[u + 1] - begin;
    const int groups = ceil_div(count, TILE_COLS);
    const u16* columns[MAX_COLS];
    float acc[MAX_COLS][4];
#pragma unroll
    for (int n = 0; n < MAX_COLS; ++n) {
      const int at = n * TILE_COLS + g;
      columns[n] = nullptr;
      if (at < count)
        columns[n] = (is_shared ? p.shared_act + static_cast<i64>(at) * width
                                : p.act + static_cast<i64>(lists.pairs[begin + at]) * width) + k0;
      acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
    }
    uint4 first[CHUNKS];
    load_columns<CHUNKS>(first, columns[0], warp * CHUNKS, k_end);
    const u8* row = ring.wait_full();
    multiply_stage<CHUNKS, DownRing::STRIDE>(acc, first, row, warp * CHUNKS, k_end, columns, groups);
    ring.release();
#pragma unroll
    for (int n = 0; n < MAX_COLS; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int at = n * TILE_COLS + 2 * q + c;
        if (at >= count) continue;
        const int pair = is_shared ? at : lists.pairs[begin + at], token = is_shared ? at : pair / p.top_k;
        const float w = !is_shared ? weights[pair] : p.shared_scale != nullptr ? p.shared_scale[at] : 1.0f;
        float low = acc[n][c], high = acc[n][c + 2];
        if (!is_shared && k0 == 0 && warp == 0 && p.down_bias != nullptr) {
          const u16* bias = p.down_bias + static_cast<i64>(p.unique_ids[u]) * p.hidden;
          low += bf16_value(bias[min_int(row0 + g, p.hidden - 1)]);
          high += bf16_value(bias[min_int(row0 + g + 8, p.hidden - 1)]);
        }
        out[token * OUT_STRIDE + g] += w * low;
        out[token * OUT_STRIDE + g + 8] += w * high;
      }
    }
    warp_sync();
  }
  consumer_sync<RING_CONSUMERS * 32>();
  for (int i = threadIdx.x; i < p.tokens * TILE_ROWS; i += RING_CONSUMERS * 32) {
    const int token = i / TILE_ROWS, row = i % TILE_ROWS;
    if (row0 + row >= p.hidden) continue;
    float v = 0.0f;
#pragma unroll
    for (int w = 0; w < RING_CONSUMERS; ++w) v += sums[(w * p.tokens + token) * OUT_STRIDE + row];
    const i64 at = static_cast<i64>(token) * p.hidden + row0 + row;
    if (p.out_is_float) static_cast<float*>(p.out)[at] = v;
    else static_cast<u16*>(p.out)[at] = bf16_bits(v);
  }
}
