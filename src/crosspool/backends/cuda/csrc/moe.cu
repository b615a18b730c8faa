// FFN of few tokens: every chosen expert's weights are read once, whatever number of tokens chose it; shared experts
// and dense layers are experts that every token passes. Two kernels: gate and up with the activation, then down.
//
// One block a multiprocessor. A warp streams its own part of k of tile after tile through shared memory: every lane
// copies exactly the bytes that it will multiply, STAGES - 1 stages ahead, so there is nothing to synchronise and
// nothing to hold in registers, and the stream does not pause between tiles. Both kernels' buffers fit one
// multiprocessor together: the second kernel fills its own while the first still computes.
#include "moe.cuh"

constexpr int MOE_WARPS = 8, MOE_THREADS = MOE_WARPS * 32;
constexpr int UP_STAGES = 3, UP_CHUNKS = 4;      // a stage: 4 chunks of 32 elements of k a warp
constexpr int DOWN_STAGES = 4, DOWN_CHUNKS = 3;
constexpr int UP_K = MOE_WARPS * UP_CHUNKS * 32;       // 1,024 elements of k a stage of the block
constexpr int DOWN_K = MOE_WARPS * DOWN_CHUNKS * 32;   // 768
constexpr int MAX_GROUPS = 4;                    // groups of 8 tokens
constexpr int OUT_STRIDE = 20;                   // floats a token takes in a warp's sums

// A warp's stages: [stage][chunk][row of the pair][lane] of 16 bytes.
template <int STAGES, int CHUNKS>
struct Stream {
  static constexpr int WARP_BYTES = STAGES * CHUNKS * 2 * 512;
  static constexpr int BYTES = MOE_WARPS * WARP_BYTES;
  u8* mine;  // this lane's first 16 bytes

  DEVICE explicit Stream(u8* smem) : mine(smem + threadIdx.x / 32 * WARP_BYTES + threadIdx.x % 32 * 16) {}
  // Start copying this lane's part of two rows: chunks at k, k + 32, ...; zeros at and after k_end.
  DEVICE void copy(int stage, const u16* low_row, const u16* high_row, int k, int k_end) const {
    u8* to = mine + stage * CHUNKS * 1024;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const bool inside = k + c * 32 < k_end;
      copy_async16(to + c * 1024, inside ? low_row + k + c * 32 : low_row, inside);
      copy_async16(to + c * 1024 + 512, inside ? high_row + k + c * 32 : high_row, inside);
    }
  }
  DEVICE uint4 low(int stage, int c) const { return load16(mine + (stage * CHUNKS + c) * 1024); }
  DEVICE uint4 high(int stage, int c) const { return load16(mine + (stage * CHUNKS + c) * 1024 + 512); }
};

// The other operand: one column (token) a lane of each group of 8, or null. The first group's is loaded a stage ahead,
// since it comes from L2.
template <int CHUNKS>
struct Columns {
  const u16* at[MAX_GROUPS];
  int count, groups;
  uint4 first[CHUNKS];

  DEVICE void load_first(int k, int k_end) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      first[c] = uint4{0, 0, 0, 0};
      if (at[0] != nullptr && k + c * 32 < k_end) first[c] = load16(at[0] + k + c * 32);
    }
  }
};

template <int STAGES, int CHUNKS>
DEVICE void multiply_stage(float (&acc)[MAX_GROUPS][4], const Stream<STAGES, CHUNKS>& stream, int stage,
                           const Columns<CHUNKS>& columns, int k, int k_end) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const uint4 low = stream.low(stage, c), high = stream.high(stage, c), b = columns.first[c];
    mma_bf16(acc[0], low.x, high.x, low.y, high.y, b.x, b.y);
    mma_bf16(acc[0], low.z, high.z, low.w, high.w, b.z, b.w);
  }
  for (int n = 1; n < columns.groups; ++n) {
#pragma unroll
    for (int m = 1; m < MAX_GROUPS; ++m) {
      if (m != n) continue;  // registers are indexed by constants only
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
        const uint4 low = stream.low(stage, c), high = stream.high(stage, c);
        uint4 b = uint4{0, 0, 0, 0};
        if (columns.at[m] != nullptr && k + c * 32 < k_end) b = load16(columns.at[m] + k + c * 32);
        mma_bf16(acc[m], low.x, high.x, low.y, high.y, b.x, b.y);
        mma_bf16(acc[m], low.z, high.z, low.w, high.w, b.z, b.w);
      }
    }
  }
}

DEVICE void clear(float (&acc)[MAX_GROUPS][4]) {
#pragma unroll
  for (int n = 0; n < MAX_GROUPS; ++n) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
}

// The chosen experts and their pairs, copied to shared memory. Entries past the number of chosen experts mean nothing.
struct Lists {
  int *ids, *offsets, *pairs, *tokens;

  DEVICE Lists(const MoeParams& p, int* smem)
      : ids(smem), offsets(ids + p.max_unique), pairs(offsets + p.max_unique + 1), tokens(pairs + p.tokens * p.top_k) {}
  DEVICE void copy(const MoeParams& p) const {
    for (int i = threadIdx.x; i < p.max_unique; i += MOE_THREADS) ids[i] = p.unique_ids[i];
    for (int i = threadIdx.x; i <= p.max_unique; i += MOE_THREADS) offsets[i] = p.unique_offsets[i];
    for (int i = threadIdx.x; i < p.tokens * p.top_k; i += MOE_THREADS) {
      const int pair = p.expert_pairs[i];
      pairs[i] = pair;
      tokens[i] = pair / p.top_k;
    }
  }
};

// Tiles of eight gate and eight up rows: shared experts' first, for their weights are known before the router has ended.
struct UpTile {
  const u16 *gate_row, *up_row;  // this lane's
  int unique, row0;              // unique -1: shared
};

DEVICE UpTile up_tile(const MoeParams& p, const Lists& lists, int item, int shared_tiles, int tiles) {
  const int g = threadIdx.x % 32 / 4;
  UpTile t;
  if (item < shared_tiles) {
    t.unique = -1;
    t.row0 = item * 8;
    const i64 row = static_cast<i64>(t.row0 + g) * p.hidden;
    t.gate_row = p.shared_gate + row;
    t.up_row = p.shared_up + row;
  } else {
    t.unique = (item - shared_tiles) / tiles;
    t.row0 = (item - shared_tiles - t.unique * tiles) * 8;
    t.gate_row = p.gate_up + (static_cast<i64>(lists.ids[t.unique]) * 2 * p.width + t.row0 + g) * p.hidden;
    t.up_row = t.gate_row + static_cast<i64>(p.width) * p.hidden;
  }
  return t;
}

KERNEL(moe_gate_up, MoeParams, MOE_THREADS, 2) {
  using UpStream = Stream<UP_STAGES, UP_CHUNKS>;
  const UpStream stream(dynamic_smem());
  const int red_floats = MOE_WARPS * ceil_div(p.tokens, TILE_COLS) * RED_FLOATS;
  float* red = reinterpret_cast<float*>(dynamic_smem() + UpStream::BYTES);  // two turns of red_floats
  const Lists lists(p, reinterpret_cast<int*>(red + 2 * red_floats));
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, k_lane = warp * UP_CHUNKS * 32 + threadIdx.x % 4 * 8;
  const int shared_tiles = p.shared_width / 8, tiles = p.width / 8, passes = ceil_div(p.hidden, UP_K);
  const int step = gridDim.x;

  // What is loaded next: `ahead`, pass `ahead_pass`. `loaded` stages have been started.
  int ahead = blockIdx.x, ahead_pass = 0, loaded = 0, total = shared_tiles;
  UpTile next{};
  auto load = [&] {
    if (ahead < total) {
      if (ahead_pass == 0) next = up_tile(p, lists, ahead, shared_tiles, tiles);
      stream.copy(loaded % UP_STAGES, next.gate_row, next.up_row, ahead_pass * UP_K + k_lane, p.hidden);
      if (++ahead_pass == passes) ahead_pass = 0, ahead += step;
    }
    copy_async_commit();
    ++loaded;
  };
  while (loaded < UP_STAGES - 1 && ahead < total) load();
  grid_wait();
  grid_launch_dependents();  // not before the router has ended: the next kernel reads its lists without waiting
  if (p.num_unique != nullptr) {
    const int unique = *p.num_unique;
    lists.copy(p);
    total += unique * tiles;
    block_sync();
  }
  while (loaded < UP_STAGES - 1) load();

  auto columns_of = [&](const UpTile& t, Columns<UP_CHUNKS>& c) {
    const bool is_shared = t.unique < 0;
    const int begin = is_shared ? 0 : lists.offsets[t.unique];
    c.count = is_shared ? p.tokens : lists.offsets[t.unique + 1] - begin;
    c.groups = ceil_div(c.count, TILE_COLS);
#pragma unroll
    for (int n = 0; n < MAX_GROUPS; ++n) {
      const int at = n * TILE_COLS + g;
      c.at[n] = nullptr;
      if (at < c.count) c.at[n] = p.x + static_cast<i64>(is_shared ? at : lists.tokens[begin + at]) * p.hidden;
    }
    c.load_first(k_lane, p.hidden);
  };

  int stage = 0, turn = 0;
  UpTile t{};
  Columns<UP_CHUNKS> columns{};
  if (static_cast<int>(blockIdx.x) < total) {
    t = up_tile(p, lists, blockIdx.x, shared_tiles, tiles);
    columns_of(t, columns);
  }
  for (int item = blockIdx.x; item < total; item += step, turn ^= 1) {
    UpTile next_tile = t;
    Columns<UP_CHUNKS> next_columns = columns;
    float acc[MAX_GROUPS][4];
    clear(acc);
    for (int pass = 0; pass < passes; ++pass) {
      if (pass + 1 < passes) {
        next_columns.load_first((pass + 1) * UP_K + k_lane, p.hidden);
      } else if (item + step < total) {
        next_tile = up_tile(p, lists, item + step, shared_tiles, tiles);
        columns_of(next_tile, next_columns);
      }
      load();
      copy_async_wait<UP_STAGES - 1>();
      multiply_stage(acc, stream, stage, columns, pass * UP_K + k_lane, p.hidden);
      if (++stage == UP_STAGES) stage = 0;
      if (pass + 1 < passes) columns = next_columns;
    }
    const bool is_shared = t.unique < 0;
    const int begin = is_shared ? 0 : lists.offsets[t.unique], count = columns.count, groups = columns.groups;
    float* sums = red + turn * red_floats;
#pragma unroll
    for (int n = 0; n < MAX_GROUPS; ++n)
      if (n < groups) store_tile(sums + (n * MOE_WARPS + warp) * RED_FLOATS, acc[n]);
    block_sync();  // one a tile: a warp that is ahead writes the other turn's sums
    const int n = threadIdx.x / 8, row = t.row0 + threadIdx.x % 8;  // 256 threads: 32 columns of 8 values
    if (n < count) {
      const float* tile = sums + n / TILE_COLS * MOE_WARPS * RED_FLOATS;
      float gate = sum_tile<MOE_WARPS>(tile, n % TILE_COLS, threadIdx.x % 8);
      float up = sum_tile<MOE_WARPS>(tile, n % TILE_COLS, threadIdx.x % 8 + 8);
      if (is_shared) {
        p.shared_act[static_cast<i64>(n) * p.shared_width + row] = bf16_bits(activate(p.activation, gate, up));
      } else {
        if (p.gate_up_bias != nullptr) {
          const u16* bias = p.gate_up_bias + static_cast<i64>(lists.ids[t.unique]) * 2 * p.width + row;
          gate += bf16_value(bias[0]);
          up += bf16_value(bias[p.width]);
        }
        p.act[static_cast<i64>(lists.pairs[begin + n]) * p.width + row] = bf16_bits(activate(p.activation, gate, up));
      }
    }
    t = next_tile;
    columns = next_columns;
  }
}

// DOWN_K elements of k of one expert (or of the shared one), for this block's sixteen rows of the output.
struct DownUnit {
  const u16 *low_row, *high_row;  // this lane's
  int unique, k0, width;          // unique -1: shared
};

KERNEL(moe_down, MoeParams, MOE_THREADS, 2) {
  using DownStream = Stream<DOWN_STAGES, DOWN_CHUNKS>;
  const DownStream stream(dynamic_smem());
  float* sums = reinterpret_cast<float*>(dynamic_smem() + DownStream::BYTES);  // MOE_WARPS * tokens * OUT_STRIDE
  float* weights = sums + MOE_WARPS * p.tokens * OUT_STRIDE;                   // tokens * top_k
  const Lists lists(p, reinterpret_cast<int*>(weights + p.tokens * p.top_k));
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const int k_lane = warp * DOWN_CHUNKS * 32 + q * 8;
  const i64 low = min_int(blockIdx.x * TILE_ROWS + g, p.hidden - 1), high = min_int(blockIdx.x * TILE_ROWS + g + 8, p.hidden - 1);
  const int shared_units = ceil_div(p.shared_width, DOWN_K), parts = ceil_div(p.width, DOWN_K);
  int units = shared_units;
  if (p.num_unique != nullptr) {
    units += *p.num_unique * parts;
    lists.copy(p);
    for (int i = threadIdx.x; i < p.tokens * p.top_k; i += MOE_THREADS) weights[i] = p.topk_weights[i];
  }
  float* out = sums + warp * p.tokens * OUT_STRIDE;
  for (int i = threadIdx.x % 32; i < p.tokens * OUT_STRIDE; i += 32) out[i] = 0.0f;
  block_sync();
  grid_launch_dependents();

  auto unit_at = [&](int unit) {
    DownUnit u;
    const u16* weight = p.shared_down;
    u.unique = -1, u.k0 = unit * DOWN_K, u.width = p.shared_width;
    if (unit >= shared_units) {
      u.unique = (unit - shared_units) / parts;
      u.k0 = (unit - shared_units - u.unique * parts) * DOWN_K;
      u.width = p.width;
      weight = p.down + static_cast<i64>(lists.ids[u.unique]) * p.hidden * p.width;
    }
    u.low_row = weight + low * u.width;
    u.high_row = weight + high * u.width;
    return u;
  };
  int loaded = 0;
  auto load = [&] {
    if (loaded < units) {
      const DownUnit u = unit_at(loaded);
      stream.copy(loaded % DOWN_STAGES, u.low_row, u.high_row, u.k0 + k_lane, u.width);
    }
    copy_async_commit();
    ++loaded;
  };
  while (loaded < DOWN_STAGES - 1) load();
  grid_wait();

  auto columns_of = [&](const DownUnit& u, Columns<DOWN_CHUNKS>& c) {
    const bool is_shared = u.unique < 0;
    const int begin = is_shared ? 0 : lists.offsets[u.unique];
    c.count = is_shared ? p.tokens : lists.offsets[u.unique + 1] - begin;
    c.groups = ceil_div(c.count, TILE_COLS);
#pragma unroll
    for (int n = 0; n < MAX_GROUPS; ++n) {
      const int at = n * TILE_COLS + g;
      c.at[n] = nullptr;
      if (at < c.count)
        c.at[n] = is_shared ? p.shared_act + static_cast<i64>(at) * u.width
                            : p.act + static_cast<i64>(lists.pairs[begin + at]) * u.width;
    }
    c.load_first(u.k0 + k_lane, u.width);
  };

  DownUnit u{};
  Columns<DOWN_CHUNKS> columns{};
  if (units > 0) {
    u = unit_at(0);
    columns_of(u, columns);
  }
  for (int unit = 0, stage = 0; unit < units; ++unit) {
    DownUnit next_unit = u;
    Columns<DOWN_CHUNKS> next_columns = columns;
    if (unit + 1 < units) {
      next_unit = unit_at(unit + 1);
      columns_of(next_unit, next_columns);
    }
    load();
    copy_async_wait<DOWN_STAGES - 1>();
    float acc[MAX_GROUPS][4];
    clear(acc);
    multiply_stage(acc, stream, stage, columns, u.k0 + k_lane, u.width);
    if (++stage == DOWN_STAGES) stage = 0;
    const bool is_shared = u.unique < 0;
    const int begin = is_shared ? 0 : lists.offsets[u.unique], count = columns.count, groups = columns.groups;
#pragma unroll
    for (int n = 0; n < MAX_GROUPS; ++n) {
      if (n >= groups) break;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int at = n * TILE_COLS + 2 * q + c;
        if (at >= count) continue;
        const int token = is_shared ? at : lists.tokens[begin + at];
        float w = 1.0f;
        if (!is_shared) w = weights[lists.pairs[begin + at]];
        else if (p.shared_scale != nullptr) w = p.shared_scale[at];
        float low_sum = acc[n][c], high_sum = acc[n][c + 2];
        if (!is_shared && u.k0 == 0 && warp == 0 && p.down_bias != nullptr) {
          const u16* bias = p.down_bias + static_cast<i64>(lists.ids[u.unique]) * p.hidden;
          low_sum += bf16_value(bias[low]);
          high_sum += bf16_value(bias[high]);
        }
        out[token * OUT_STRIDE + g] += w * low_sum;
        out[token * OUT_STRIDE + g + 8] += w * high_sum;
      }
    }
    warp_sync();
    u = next_unit;
    columns = next_columns;
  }
  block_sync();
  for (int i = threadIdx.x; i < p.tokens * TILE_ROWS; i += MOE_THREADS) {
    const int token = i / TILE_ROWS, row = i % TILE_ROWS;
    if (static_cast<int>(blockIdx.x) * TILE_ROWS + row >= p.hidden) continue;
    float v = 0.0f;
#pragma unroll
    for (int w = 0; w < MOE_WARPS; ++w) v += sums[(w * p.tokens + token) * OUT_STRIDE + row];
    const i64 at = static_cast<i64>(token) * p.hidden + blockIdx.x * TILE_ROWS + row;
    if (p.out_is_float) static_cast<float*>(p.out)[at] = v;
    else static_cast<u16*>(p.out)[at] = bf16_bits(v);
  }
}
