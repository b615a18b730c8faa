// Gate and up of the FFN of few tokens, and the activation. Every chosen expert's weights are read once, whatever number of
// tokens chose it; shared experts and dense layers are experts that every token passes.
#pragma once
#include "moe_stream.cuh"

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

// Tiles of eight gate and eight up rows: shared experts' first, for their weights are known before the router has ended.
struct UpTile {
  const u16 *gate_row, *up_row;  // this lane's
  int unique, row0;              // unique -1: shared
};

// Gate and up: blocks take every gridDim.x-th tile. Shared experts' tiles may start before the lists are there.
struct UpStep {
  using UpStream = Stream<UP_STAGES, UP_CHUNKS>;
  const MoeParams& p;
  const UpStream stream;
  const Lists lists;  // by value: a reference into the same object would keep all of it out of registers
  float* red;  // two turns of red_floats
  int red_floats, warp, g, k_lane, shared_tiles, tiles, passes, step, total;
  int ahead, ahead_pass = 0, loaded = 0;  // what is loaded next, and how many stages have been started before `run`
  int load_stage = 0;                     // where that goes
  UpTile next{};
  // Of `p`, in registers, as in `DownStep`.
  const u16 *x, *gate_up, *shared_gate, *shared_up;
  const int hidden, width, tokens;
  bool writes_words = false;  // activations go there
  u32 epoch = 0;              // of words

  DEVICE UpStep(const MoeParams& p, u8* smem, const Lists& lists, float* red)
      : p(p), stream(smem), lists(lists), red(red), red_floats(MOE_WARPS * ceil_div(p.tokens, TILE_COLS) * RED_FLOATS),
        warp(threadIdx.x / 32), g(threadIdx.x % 32 / 4), k_lane(warp * UP_CHUNKS * 32 + threadIdx.x % 4 * 8),
        shared_tiles(p.shared_width / 8), tiles(p.width / 8), passes(ceil_div(p.hidden, UP_K)), step(gridDim.x),
        total(shared_tiles), ahead(blockIdx.x), x(p.x), gate_up(p.gate_up), shared_gate(p.shared_gate),
        shared_up(p.shared_up), hidden(p.hidden), width(p.width), tokens(p.tokens) {}

  DEVICE UpTile tile_at(int item) const {
    UpTile t;
    if (item < shared_tiles) {
      t.unique = -1;
      t.row0 = item * 8;
      const i64 row = static_cast<i64>(t.row0 + g) * hidden;
      t.gate_row = shared_gate + row;
      t.up_row = shared_up + row;
    } else {
      t.unique = (item - shared_tiles) / tiles;
      t.row0 = (item - shared_tiles - t.unique * tiles) * 8;
      t.gate_row = gate_up + (static_cast<i64>(lists.ids[t.unique]) * 2 * width + t.row0 + g) * hidden;
      t.up_row = t.gate_row + static_cast<i64>(width) * hidden;
    }
    return t;
  }

  DEVICE void load() {
    if (ahead < total) {
      if (ahead_pass == 0) next = tile_at(ahead);
      const int k = ahead_pass * UP_K + k_lane;
      if ((ahead_pass + 1) * UP_K <= hidden) stream.copy_whole(load_stage, next.gate_row + k, next.up_row + k);
      else stream.copy(load_stage, next.gate_row, next.up_row, k, hidden);
      if (++ahead_pass == passes) ahead_pass = 0, ahead += step;
    }
    copy_async_commit();
    ++loaded;
    if (++load_stage == UP_STAGES) load_stage = 0;
  }
  DEVICE void load_shared() {
    while (loaded < UP_STAGES - 1 && ahead < total) load();
  }
  // `unique`: how many experts are chosen; the lists are complete.
  DEVICE void run(int unique) {
    total += unique * tiles;
    const int activation = p.activation, shared_width = p.shared_width, routed_values = tokens * p.top_k * width;
    const u16* const all_bias = p.gate_up_bias;
    u16 *const act = p.act, *const shared_act = p.shared_act;
    u64* const words = p.act_words;
    while (loaded < UP_STAGES - 1) load();
    int stage = 0, turn = 0;
    for (int item = blockIdx.x; item < total; item += step, turn ^= 1) {
      const UpTile t = tile_at(item);
      const bool is_shared = t.unique < 0;
      const int begin = is_shared ? 0 : lists.offsets[t.unique];
      const int count = is_shared ? tokens : lists.offsets[t.unique + 1] - begin, groups = ceil_div(count, TILE_COLS);
      Columns<UP_CHUNKS> columns;
  #pragma unroll
      for (int n = 0; n < MAX_GROUPS; ++n) {
        const int at = n * TILE_COLS + g;
        columns.at[n] = nullptr;
        if (at < count) columns.at[n] = x + static_cast<i64>(is_shared ? at : lists.tokens[begin + at]) * hidden;
      }
      float acc[MAX_GROUPS][4];
      clear(acc);
      for (int pass = 0; pass < passes; ++pass) {
        columns.load_first(pass * UP_K + k_lane, hidden);
        load();
        copy_async_wait<UP_STAGES - 1>();
        multiply_stage(acc, stream, stage, columns, groups, pass * UP_K + k_lane, hidden);
        if (++stage == UP_STAGES) stage = 0;
      }
      float* sums = red + turn * red_floats;
  #pragma unroll
      for (int n = 0; n < MAX_GROUPS; ++n)
        if (n < groups) store_tile(sums + (n * MOE_WARPS + warp) * RED_FLOATS, acc[n]);
      block_sync();  // one a tile: a warp that is ahead writes the other turn's sums
      const int n = threadIdx.x / 8, row = t.row0 + threadIdx.x % 8;  // 256 threads: 32 columns of 8 values
      u16 value = 0;
      if (n < count) {
        const float* tile = sums + n / TILE_COLS * MOE_WARPS * RED_FLOATS;
        float gate = sum_tile<MOE_WARPS>(tile, n % TILE_COLS, threadIdx.x % 8);
        float up = sum_tile<MOE_WARPS>(tile, n % TILE_COLS, threadIdx.x % 8 + 8);
        if (all_bias != nullptr && !is_shared) {
          const u16* bias = all_bias + static_cast<i64>(lists.ids[t.unique]) * 2 * width + row;
          gate += bf16_value(bias[0]);
          up += bf16_value(bias[width]);
        }
        value = bf16_bits(activate(activation, gate, up));
      }
      if (!writes_words) {
        if (n < count && is_shared) shared_act[static_cast<i64>(n) * shared_width + row] = value;
        else if (n < count) act[static_cast<i64>(lists.pairs[begin + n]) * width + row] = value;
        continue;
      }
      const u32 pair = value | static_cast<u32>(shfl_xor(static_cast<int>(value), 1)) << 16;
      if (n >= count || threadIdx.x & 1) continue;
      const int at = is_shared ? routed_values + n * shared_width : lists.pairs[begin + n] * width;
      store_relaxed_device(words + (at + row) / 2, static_cast<u64>(epoch) << 32 | pair);
    }
  }
};
