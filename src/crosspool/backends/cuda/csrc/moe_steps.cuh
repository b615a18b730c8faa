// The two steps of the FFN of few tokens, for kernels that run one of them or both: gate and up with the activation, then
// the down projection. Every chosen expert's weights are read once, whatever number of tokens chose it; shared experts
// and dense layers are experts that every token passes.
//
// One block a multiprocessor. A warp streams weights through its own shared memory: every lane copies exactly the bytes
// that it will multiply, STAGES - 1 stages ahead, so there is nothing to synchronise and nothing to hold in registers,
// and the stream does not pause between tiles. NOTE: a block takes more than half of a multiprocessor's shared memory on
// purpose. Blocks of overlapping kernels start as multiprocessors come free; if two of these fit one, half of the
// multiprocessors get two and the other half none.
#pragma once
#include "moe.cuh"

#if (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900) || defined(CROSSPOOL_SMALL_SMEM)
constexpr int MOE_STAGES = 3;  // 163 KiB of shared memory a block at most
#else
constexpr int MOE_STAGES = 5;
#endif
constexpr int MOE_WARPS = 8, MOE_THREADS = MOE_WARPS * 32;
constexpr int UP_STAGES = MOE_STAGES, UP_CHUNKS = 4;      // a stage: 4 chunks of 32 elements of k a warp
constexpr int DOWN_STAGES = MOE_STAGES, DOWN_CHUNKS = 4;  // a warp's unit: 128 elements of k of one expert
constexpr int UP_K = MOE_WARPS * UP_CHUNKS * 32;       // 1,024 elements of k a stage of the block
constexpr int DOWN_K = DOWN_CHUNKS * 32;               // 128: each warp has its own units
constexpr int MAX_GROUPS = 4;                    // groups of 8 tokens
constexpr int FIRST_AHEAD = 4;                   // units whose activations a warp has in registers
constexpr int OUT_STRIDE = 20;                   // floats a token takes in a warp's sums
constexpr int STREAM_BYTES = MOE_STAGES * 32768;  // of either step

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

// The other operand: one column (token) a lane of each group of 8, or null. The first group's is loaded ahead.
template <int CHUNKS>
struct Columns {
  const u16* at[MAX_GROUPS];
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
                           const Columns<CHUNKS>& columns, int groups, int k, int k_end) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const uint4 low = stream.low(stage, c), high = stream.high(stage, c), b = columns.first[c];
    mma_bf16(acc[0], low.x, high.x, low.y, high.y, b.x, b.y);
    mma_bf16(acc[0], low.z, high.z, low.w, high.w, b.z, b.w);
  }
  for (int n = 1; n < groups; ++n) {
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

// Gate and up: blocks take every gridDim.x-th tile. Shared experts' tiles may start before the lists are there.
struct UpStep {
  using UpStream = Stream<UP_STAGES, UP_CHUNKS>;
  const MoeParams& p;
  const UpStream stream;
  const Lists lists;  // by value: a reference into the same object would keep all of it out of registers
  float* red;  // two turns of red_floats
  int red_floats, warp, g, k_lane, shared_tiles, tiles, passes, step, total;
  int ahead, ahead_pass = 0, loaded = 0;  // what is loaded next, and how many stages have been started
  UpTile next{};

  DEVICE UpStep(const MoeParams& p, u8* smem, const Lists& lists, float* red)
      : p(p), stream(smem), lists(lists), red(red), red_floats(MOE_WARPS * ceil_div(p.tokens, TILE_COLS) * RED_FLOATS),
        warp(threadIdx.x / 32), g(threadIdx.x % 32 / 4), k_lane(warp * UP_CHUNKS * 32 + threadIdx.x % 4 * 8),
        shared_tiles(p.shared_width / 8), tiles(p.width / 8), passes(ceil_div(p.hidden, UP_K)), step(gridDim.x),
        total(shared_tiles), ahead(blockIdx.x) {}

  DEVICE void load() {
    if (ahead < total) {
      if (ahead_pass == 0) next = up_tile(p, lists, ahead, shared_tiles, tiles);
      stream.copy(loaded % UP_STAGES, next.gate_row, next.up_row, ahead_pass * UP_K + k_lane, p.hidden);
      if (++ahead_pass == passes) ahead_pass = 0, ahead += step;
    }
    copy_async_commit();
    ++loaded;
  }
  DEVICE void load_shared() {
    while (loaded < UP_STAGES - 1 && ahead < total) load();
  }
  // `unique`: how many experts are chosen; the lists are complete.
  DEVICE void run(int unique) {
    total += unique * tiles;
    while (loaded < UP_STAGES - 1) load();
    int stage = 0, turn = 0;
    for (int item = blockIdx.x; item < total; item += step, turn ^= 1) {
      const UpTile t = up_tile(p, lists, item, shared_tiles, tiles);
      const bool is_shared = t.unique < 0;
      const int begin = is_shared ? 0 : lists.offsets[t.unique];
      const int count = is_shared ? p.tokens : lists.offsets[t.unique + 1] - begin, groups = ceil_div(count, TILE_COLS);
      Columns<UP_CHUNKS> columns;
  #pragma unroll
      for (int n = 0; n < MAX_GROUPS; ++n) {
        const int at = n * TILE_COLS + g;
        columns.at[n] = nullptr;
        if (at < count) columns.at[n] = p.x + static_cast<i64>(is_shared ? at : lists.tokens[begin + at]) * p.hidden;
      }
      float acc[MAX_GROUPS][4];
      clear(acc);
      for (int pass = 0; pass < passes; ++pass) {
        columns.load_first(pass * UP_K + k_lane, p.hidden);
        load();
        copy_async_wait<UP_STAGES - 1>();
        multiply_stage(acc, stream, stage, columns, groups, pass * UP_K + k_lane, p.hidden);
        if (++stage == UP_STAGES) stage = 0;
      }
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
    }
  }
};

// Which unit: DOWN_K elements of k, the `part`th of an expert; unique -1: of the shared one.
struct DownCursor {
  int unit, unique, part;
};

// DOWN_K elements of k of one expert (or of the shared one), for this block's sixteen rows of the output.
struct DownUnit {
  const u16 *low_row, *high_row;  // this lane's
  int unique, k0, width;          // unique -1: shared
  int begin, count;               // its pairs, or the tokens
};

// This lane's column `at` of a unit: an activation row, or null.
DEVICE const u16* down_column(const MoeParams& p, const Lists& lists, const DownUnit& u, int at) {
  if (at >= u.count) return nullptr;
  return u.unique < 0 ? p.shared_act + static_cast<i64>(at) * u.width
                      : p.act + static_cast<i64>(lists.pairs[u.begin + at]) * u.width;
}

// Down: one row tile of a block. Each warp takes every eighth unit and keeps its own sums, added in warp order.
struct DownStep {
  using DownStream = Stream<DOWN_STAGES, DOWN_CHUNKS>;
  const MoeParams& p;
  const DownStream stream;
  const Lists lists;  // by value: a reference into the same object would keep all of it out of registers
  const float* weights;  // (tokens * top_k)
  float* sums;           // MOE_WARPS * tokens * OUT_STRIDE
  int warp, g, q, k_lane, shared_units, parts, units;
  int row0 = 0, loaded = 0;
  DownCursor ahead{};
  i64 low = 0, high = 0;  // this lane's two rows

  DEVICE DownStep(const MoeParams& p, u8* smem, const Lists& lists, const float* weights, float* sums, int unique)
      : p(p), stream(smem), lists(lists), weights(weights), sums(sums), warp(threadIdx.x / 32),
        g(threadIdx.x % 32 / 4), q(threadIdx.x % 4), k_lane(q * 8), shared_units(ceil_div(p.shared_width, DOWN_K)),
        parts(ceil_div(p.width, DOWN_K)), units(shared_units + unique * parts) {}

  // A warp's first unit, and the one after `c`.
  DEVICE DownCursor start() const { return settle(DownCursor{warp, -1, warp}); }
  DEVICE DownCursor after(DownCursor c) const {
    c.unit += MOE_WARPS, c.part += MOE_WARPS;
    return settle(c);
  }
  DEVICE DownCursor settle(DownCursor c) const {
    if (c.unique < 0 && c.part >= shared_units) c.unique = 0, c.part -= shared_units;
    if (c.unique >= 0 && parts > 0)
      while (c.part >= parts) ++c.unique, c.part -= parts;
    return c;
  }
  DEVICE DownUnit unit_at(const DownCursor& c) const {
    DownUnit u;
    const u16* weight = p.shared_down;
    u.unique = c.unique, u.k0 = c.part * DOWN_K, u.width = p.shared_width, u.begin = 0, u.count = p.tokens;
    if (c.unique >= 0) {
      u.width = p.width;
      u.begin = lists.offsets[u.unique];
      u.count = lists.offsets[u.unique + 1] - u.begin;
      weight = p.down + static_cast<i64>(lists.ids[u.unique]) * p.hidden * p.width;
    }
    u.low_row = weight + low * u.width;
    u.high_row = weight + high * u.width;
    return u;
  }
  DEVICE void load() {
    if (ahead.unit < units) {
      const DownUnit u = unit_at(ahead);
      stream.copy(loaded % DOWN_STAGES, u.low_row, u.high_row, u.k0 + k_lane, u.width);
    }
    copy_async_commit();
    ahead = after(ahead);
    ++loaded;
  }
  // Start on a row tile: weights alone, the activations need not be there yet.
  DEVICE void begin(int row_tile) {
    row0 = row_tile * TILE_ROWS;
    low = min_int(row0 + g, p.hidden - 1), high = min_int(row0 + g + 8, p.hidden - 1);
    ahead = start(), loaded = 0;
    float* out = sums + warp * p.tokens * OUT_STRIDE;
    for (int i = threadIdx.x % 32; i < p.tokens * OUT_STRIDE; i += 32) out[i] = 0.0f;
    warp_sync();
    while (loaded < DOWN_STAGES - 1) load();
  }
  // epoch: of words.
  DEVICE void run(u32 epoch) {
    float* out = sums + warp * p.tokens * OUT_STRIDE;
    uint4 first[FIRST_AHEAD][DOWN_CHUNKS];  // the first group's columns, of this unit and the next ones
    auto load_first = [&](const DownCursor& c, uint4 (&to)[DOWN_CHUNKS]) {
      const bool is_there = c.unit < units;
      const DownUnit u = is_there ? unit_at(c) : DownUnit{};
      const u16* column = is_there ? down_column(p, lists, u, g) : nullptr;
  #pragma unroll
      for (int c = 0; c < DOWN_CHUNKS; ++c) {
        const int k = u.k0 + k_lane + c * 32;
        to[c] = uint4{0, 0, 0, 0};
        if (column != nullptr && k < u.width) to[c] = load16(column + k);
      }
    };
    DownCursor at = start(), peek = at;
  #pragma unroll
    for (int n = 0; n < FIRST_AHEAD - 1; ++n, peek = after(peek)) load_first(peek, first[n]);
    int stage = 0;
    for (; at.unit < units; at = after(at), peek = after(peek)) {
      load_first(peek, first[FIRST_AHEAD - 1]);
      const DownUnit u = unit_at(at);
      load();
      copy_async_wait<DOWN_STAGES - 1>();
      for (int n0 = 0; n0 < u.count; n0 += TILE_COLS) {
        if (n0 > 0) {
          const u16* column = down_column(p, lists, u, n0 + g);
  #pragma unroll
          for (int c = 0; c < DOWN_CHUNKS; ++c) {
            const int k = u.k0 + k_lane + c * 32;
            first[0][c] = uint4{0, 0, 0, 0};
            if (column != nullptr && k < u.width) first[0][c] = load16(column + k);
          }
        }
        float acc[2][4] = {};  // two shorter chains
  #pragma unroll
        for (int c = 0; c < DOWN_CHUNKS; ++c) {
          const uint4 w_low = stream.low(stage, c), w_high = stream.high(stage, c);
          mma_bf16(acc[0], w_low.x, w_high.x, w_low.y, w_high.y, first[0][c].x, first[0][c].y);
          mma_bf16(acc[1], w_low.z, w_high.z, w_low.w, w_high.w, first[0][c].z, first[0][c].w);
        }
  #pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = n0 + 2 * q + c;
          if (column >= u.count) continue;
          const bool is_shared = u.unique < 0;
          const int token = is_shared ? column : lists.tokens[u.begin + column];
          float w = 1.0f, low_sum = acc[0][c] + acc[1][c], high_sum = acc[0][c + 2] + acc[1][c + 2];
          if (!is_shared) w = weights[lists.pairs[u.begin + column]];
          else if (p.shared_scale != nullptr) w = load_float_l2(p.shared_scale + column);
          if (!is_shared && u.k0 == 0 && p.down_bias != nullptr) {
            const u16* bias = p.down_bias + static_cast<i64>(lists.ids[u.unique]) * p.hidden;
            low_sum += bf16_value(bias[low]);
            high_sum += bf16_value(bias[high]);
          }
          out[token * OUT_STRIDE + g] += w * low_sum;
          out[token * OUT_STRIDE + g + 8] += w * high_sum;
        }
        warp_sync();
      }
      if (++stage == DOWN_STAGES) stage = 0;
  #pragma unroll
      for (int n = 1; n < FIRST_AHEAD; ++n)
  #pragma unroll
        for (int c = 0; c < DOWN_CHUNKS; ++c) first[n - 1][c] = first[n][c];
    }
    block_sync();
    for (int i = threadIdx.x; i < p.tokens * TILE_ROWS; i += MOE_THREADS) {
      const int token = i / TILE_ROWS, row = row0 + i % TILE_ROWS;
      if (row >= p.hidden) continue;
      float v = 0.0f;
  #pragma unroll
      for (int w = 0; w < MOE_WARPS; ++w) v += sums[(w * p.tokens + token) * OUT_STRIDE + i % TILE_ROWS];
      const i64 at = static_cast<i64>(token) * p.hidden + row;
      if (p.out_form == WORDS) store_word(static_cast<u64*>(p.out) + at, sum_word(v, epoch));
      else if (p.out_form == FP32) static_cast<float*>(p.out)[at] = v;
      else static_cast<u16*>(p.out)[at] = bf16_bits(v);
    }
    block_sync();  // before the next row tile clears the sums
  }
};
