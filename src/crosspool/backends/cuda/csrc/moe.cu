// FFN of few tokens: every chosen expert's weights are read once, whatever number of tokens chose it; shared experts
// and dense layers are experts that every token passes. Two kernels: gate and up with the activation, then down.
#include "moe.cuh"

constexpr int UP_WARPS = 8, UP_CHUNKS = 8;       // 2,048 elements of k a pass
constexpr int DOWN_WARPS = 16, DOWN_CHUNKS = 4;  // a warp's unit: 128 elements of k of one expert
constexpr int UNIT_K = DOWN_CHUNKS * 32;
constexpr int OUT_STRIDE = 20;                   // floats a token takes in a warp's sums

// One block: eight gate rows and the same eight up rows of one expert. Shared blocks come first: their weights are
// known before the router has ended.
KERNEL(moe_gate_up, MoeParams, UP_WARPS * 32, 2) {
  float* red = reinterpret_cast<float*>(dynamic_smem());  // UP_WARPS * RED_FLOATS
  constexpr int PASS = UP_WARPS * UP_CHUNKS * 32;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  const int shared_tiles = ceil_div(p.shared_width, 8), tiles = ceil_div(p.width, 8);
  const bool is_shared = static_cast<int>(blockIdx.x) < shared_tiles;
  const int routed = static_cast<int>(blockIdx.x) - shared_tiles;
  const int k_warp = warp * UP_CHUNKS * 32;
  TileWeights<UP_CHUNKS> tile;
  const u16 *gate_row, *up_row;
  const int* pairs = nullptr;
  int count = p.tokens, i0, width, expert = 0;
  if (is_shared) {
    i0 = blockIdx.x * 8;
    width = p.shared_width;
    const i64 row = static_cast<i64>(min_int(i0 + g, width - 1)) * p.hidden;
    gate_row = p.shared_gate + row;
    up_row = p.shared_up + row;
    tile.load(gate_row, up_row, k_warp, p.hidden);
    grid_wait();
  } else {
    grid_wait();
    if (routed / tiles >= *p.num_unique) {
      grid_launch_dependents();
      return;
    }
    const int unique = routed / tiles;
    expert = p.unique_ids[unique];
    i0 = routed % tiles * 8;
    width = p.width;
    gate_row = p.gate_up + (static_cast<i64>(expert) * 2 * width + min_int(i0 + g, width - 1)) * p.hidden;
    up_row = gate_row + static_cast<i64>(width) * p.hidden;
    tile.load(gate_row, up_row, k_warp, p.hidden);
    pairs = p.expert_pairs + p.unique_offsets[unique];
    count = p.unique_offsets[unique + 1] - p.unique_offsets[unique];
  }
  grid_launch_dependents();  // not before the router has ended: the next kernel reads its lists without waiting

  for (int n0 = 0; n0 < count; n0 += TILE_COLS) {
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const u16* column = nullptr;
    if (n0 + g < count) column = p.x + static_cast<i64>(pairs != nullptr ? pairs[n0 + g] / p.top_k : n0 + g) * p.hidden;
    for (int pass = 0; pass * PASS < p.hidden; ++pass) {
      if (pass > 0 || (n0 > 0 && PASS < p.hidden)) tile.load(gate_row, up_row, pass * PASS + k_warp, p.hidden);
      tile.multiply(acc, column, pass * PASS + k_warp, p.hidden);
    }
    store_tile(red + warp * RED_FLOATS, acc);
    block_sync();
    if (threadIdx.x < 64) {
      const int n = n0 + threadIdx.x / 8, i = threadIdx.x % 8;
      float gate = sum_tile<UP_WARPS>(red, threadIdx.x / 8, i), up = sum_tile<UP_WARPS>(red, threadIdx.x / 8, i + 8);
      if (n < count && i0 + i < width) {
        if (pairs != nullptr && p.gate_up_bias != nullptr) {
          gate += bf16_value(p.gate_up_bias[static_cast<i64>(expert) * 2 * width + i0 + i]);
          up += bf16_value(p.gate_up_bias[static_cast<i64>(expert) * 2 * width + width + i0 + i]);
        }
        const u16 v = bf16_bits(activate(p.activation, gate, up));
        if (pairs != nullptr) p.act[static_cast<i64>(pairs[n]) * width + i0 + i] = v;
        else p.shared_act[static_cast<i64>(n) * width + i0 + i] = v;
      }
    }
    block_sync();
  }
}

// What one warp multiplies at a time: UNIT_K elements of k of one expert (or of the shared expert).
struct DownUnit {
  const u16 *low_row, *high_row;
  int expert, unique, k_begin, k_end;  // expert -1: shared
};

DEVICE DownUnit down_unit(const MoeParams& p, int unit, int shared_units, int parts, int row0, int g) {
  DownUnit u;
  const u16* weight;
  int width;
  if (unit < shared_units) {
    u.expert = -1;
    u.k_begin = unit * UNIT_K;
    width = p.shared_width;
    weight = p.shared_down;
  } else {
    const int routed = unit - shared_units;
    u.unique = routed / parts;
    u.expert = p.unique_ids[u.unique];
    u.k_begin = routed % parts * UNIT_K;
    width = p.width;
    weight = p.down + static_cast<i64>(u.expert) * p.hidden * width;
  }
  u.k_end = width;
  u.low_row = weight + static_cast<i64>(min_int(row0 + g, p.hidden - 1)) * width;
  u.high_row = weight + static_cast<i64>(min_int(row0 + g + 8, p.hidden - 1)) * width;
  return u;
}

// A unit's products, weighted, onto this warp's sums out[token][row].
DEVICE void add_unit(const MoeParams& p, const DownUnit& u, const TileWeights<DOWN_CHUNKS>& tile, int row0, float* out) {
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const bool is_shared = u.expert < 0;
  const int begin = is_shared ? 0 : p.unique_offsets[u.unique];
  const int* pairs = is_shared ? nullptr : p.expert_pairs + begin;
  const int count = is_shared ? p.tokens : p.unique_offsets[u.unique + 1] - begin;
  for (int n0 = 0; n0 < count; n0 += TILE_COLS) {
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const u16* column = nullptr;
    if (n0 + g < count)
      column = is_shared ? p.shared_act + static_cast<i64>(n0 + g) * p.shared_width
                         : p.act + static_cast<i64>(pairs[n0 + g]) * p.width;
    tile.multiply(acc, column, u.k_begin, u.k_end);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int n = n0 + 2 * q + c;
      if (n >= count) continue;
      const int token = is_shared ? n : pairs[n] / p.top_k;
      const float w = is_shared ? (p.shared_scale != nullptr ? p.shared_scale[n] : 1.0f) : p.topk_weights[pairs[n]];
      float low = acc[c], high = acc[c + 2];
      if (!is_shared && u.k_begin == 0 && p.down_bias != nullptr) {
        const u16* bias = p.down_bias + static_cast<i64>(u.expert) * p.hidden;
        low += bf16_value(bias[min_int(row0 + g, p.hidden - 1)]);
        high += bf16_value(bias[min_int(row0 + g + 8, p.hidden - 1)]);
      }
      out[token * OUT_STRIDE + g] += w * low;
      out[token * OUT_STRIDE + g + 8] += w * high;
    }
    warp_sync();
  }
}

// One block: sixteen rows of the output. Its warps share the units; each keeps its own sums, added in warp order.
KERNEL(moe_down, MoeParams, DOWN_WARPS * 32, 1) {
  float* sums = reinterpret_cast<float*>(dynamic_smem());  // DOWN_WARPS * tokens * OUT_STRIDE
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, row0 = blockIdx.x * TILE_ROWS;
  const int shared_units = ceil_div(p.shared_width, UNIT_K), parts = ceil_div(p.width, UNIT_K);
  const int units = shared_units + (p.num_unique != nullptr ? *p.num_unique * parts : 0);
  float* out = sums + warp * p.tokens * OUT_STRIDE;
  for (int i = threadIdx.x % 32; i < p.tokens * OUT_STRIDE; i += 32) out[i] = 0.0f;
  warp_sync();
  DownUnit unit{};
  TileWeights<DOWN_CHUNKS> tile;
  if (warp < units) {
    unit = down_unit(p, warp, shared_units, parts, row0, g);
    tile.load(unit.low_row, unit.high_row, unit.k_begin, unit.k_end);
  }
  grid_launch_dependents();
  bool waited = false;
  for (int i = warp; i < units; i += DOWN_WARPS) {
    DownUnit next = unit;
    TileWeights<DOWN_CHUNKS> next_tile = tile;
    if (i + DOWN_WARPS < units) {
      next = down_unit(p, i + DOWN_WARPS, shared_units, parts, row0, g);
      next_tile.load(next.low_row, next.high_row, next.k_begin, next.k_end);
    }
    if (!waited) grid_wait();  // for the activations; two units of weights are on their way
    waited = true;
    add_unit(p, unit, tile, row0, out);
    unit = next;
    tile = next_tile;
  }
  if (!waited) grid_wait();
  block_sync();
  for (int i = threadIdx.x; i < p.tokens * TILE_ROWS; i += DOWN_WARPS * 32) {
    const int token = i / TILE_ROWS, row = i % TILE_ROWS;
    if (row0 + row >= p.hidden) continue;
    float v = 0.0f;
#pragma unroll
    for (int w = 0; w < DOWN_WARPS; ++w) v += sums[(w * p.tokens + token) * OUT_STRIDE + row];
    const i64 at = static_cast<i64>(token) * p.hidden + row0 + row;
    if (p.out_is_float) static_cast<float*>(p.out)[at] = v;
    else static_cast<u16*>(p.out)[at] = bf16_bits(v);
  }
}
