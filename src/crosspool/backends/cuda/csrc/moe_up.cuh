// Gate and up of the FFN of few tokens, and the activation. Every chosen expert's weights are read once, whatever number of
// tokens chose it; shared experts and dense layers are experts that every token passes.
#pragma once
#include "moe_stream.cuh"

// What a tile is multiplied with: `count` columns (tokens) from the `begin`th of the lists; this lane's one of the first eight.
struct UpColumns {
  int begin, count;
  const u16* first;  // null where there are fewer
};

template <int GROUPS>
DEVICE void clear(float (&acc)[GROUPS][4]) {
#pragma unroll
  for (int n = 0; n < GROUPS; ++n) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
}

// A tile is eight gate and eight up rows; shared experts' come first, for their weights are known before the router has ended.
struct UpPlace {
  int unique, row0;  // unique -1: shared
};
struct UpTile {
  const u16 *gate_row, *up_row;  // the first that this lane copies
};

// Nothing is streamed behind gate and up.
struct NothingNext {
  DEVICE void copy_next(int) {}
};

// Gate and up: blocks take every gridDim.x-th tile. Shared experts' tiles may start before the lists are there. GROUPS: of
// eight tokens, at most.
template <int STAGES, int GROUPS>
struct UpStep {
  using UpStream = Stream<STAGES, UP_CHUNKS>;
  const UpStream stream;
  const Lists lists;  // by value: a reference into the same object would keep all of it out of registers
  float* red;  // two turns of red_floats
  int red_floats, warp, g, k_lane, shared_tiles, tiles, passes, step, total;
  const u32 per_tile;  // to divide by `tiles`
  int ahead, ahead_pass = 0, loaded = 0;  // what is loaded next, and how many stages have been started before `run`
  int load_stage = 0;                     // where that goes
  UpTile next{};
  // Of the parameters, in registers, as in `DownStep`.
  const u16 *x, *gate_up, *shared_gate, *shared_up, *all_bias;
  u16 *act, *shared_act;
  u64* words;
  const int hidden, width, shared_width, tokens, activation, routed_values;
  bool writes_words = false;  // activations go there
  u32 epoch = 0;              // of words

  DEVICE UpStep(const MoeParams& p, u8* smem, const Lists& lists, float* red)
      : stream(smem), lists(lists), red(red), red_floats(MOE_WARPS * ceil_div(p.tokens, TILE_COLS) * RED_FLOATS),
        warp(threadIdx.x / 32), g(threadIdx.x % 32 / 4), k_lane(warp * UP_CHUNKS * 32 + threadIdx.x % 4 * 8),
        shared_tiles(p.shared_width / 8), tiles(p.width / 8), passes(ceil_div(p.hidden, UP_K)), step(gridDim.x),
        total(shared_tiles), per_tile(tiles > 1 ? 0xffffffffu / tiles + 1 : 0), ahead(blockIdx.x), x(p.x), gate_up(p.gate_up),
        shared_gate(p.shared_gate), shared_up(p.shared_up), all_bias(p.gate_up_bias), act(p.act), shared_act(p.shared_act),
        words(p.act_words),
        hidden(p.hidden), width(p.width), shared_width(p.shared_width), tokens(p.tokens), activation(p.activation),
        routed_values(p.tokens * p.top_k * p.width) {}

  DEVICE UpPlace place_at(int item) const {
    if (item < shared_tiles) return UpPlace{-1, item * 8};
    const int unique = per_tile == 0 ? item - shared_tiles : static_cast<int>(multiply_high(item - shared_tiles, per_tile));
    return UpPlace{unique, (item - shared_tiles - unique * tiles) * 8};
  }
  DEVICE UpTile tile_at(int item) const {
    const UpPlace place = place_at(item);
    const int row = place.row0 + UpStream::copy_row();
    if (place.unique < 0) {
      const i64 at = static_cast<i64>(row) * hidden;
      return UpTile{shared_gate + at, shared_up + at};
    }
    const u16* gate_row = gate_up + (static_cast<i64>(lists.ids[place.unique]) * 2 * width + row) * hidden;
    return UpTile{gate_row, gate_row + static_cast<i64>(width) * hidden};
  }
  // next: whose weights go on where these end.
  template <class Next>
  DEVICE void load(Next& next_step) {
    if (ahead < total) {
      if (ahead_pass == 0) next = tile_at(ahead);
      const int k = ahead_pass * UP_K + warp * UP_CHUNKS * 32 + UpStream::copy_k();
      if ((ahead_pass + 1) * UP_K <= hidden) stream.copy_whole(load_stage, next.gate_row + k, next.up_row + k, 4 * hidden);
      else stream.copy(load_stage, next.gate_row + k, next.up_row + k, 4 * hidden, k, hidden);
      if (++ahead_pass == passes) ahead_pass = 0, ahead += step;
    } else {
      next_step.copy_next(load_stage);
    }
    copy_async_commit();
    ++loaded;
    stream.step(load_stage);
  }
  DEVICE void load_shared() {
    NothingNext nothing;
#pragma unroll 1
    while (loaded < STAGES - 1 && ahead < total) load(nothing);
  }
  DEVICE UpColumns columns_of(int unique) const {
    UpColumns c{0, tokens, nullptr};
    if (unique >= 0) c.begin = lists.offsets[unique], c.count = lists.offsets[unique + 1] - c.begin;
    if (g < c.count) c.first = column(c, unique < 0, g);
    return c;
  }
  DEVICE const u16* column(const UpColumns& c, bool is_shared, int at) const {
    return x + static_cast<i64>(is_shared ? at : lists.token(c.begin + at)) * hidden;
  }
  // This lane's part of a column for one pass; zeros where there is none.
  DEVICE void load_column(const u16* from, int k, uint4 (&to)[UP_CHUNKS]) const {
#pragma unroll
    for (int c = 0; c < UP_CHUNKS; ++c) {
      to[c] = uint4{0, 0, 0, 0};
      if (from != nullptr && k + c * 32 < hidden) to[c] = load16(from + k + c * 32);
    }
  }
  DEVICE void multiply(int stage, const uint4 (&column)[UP_CHUNKS], float (&acc)[4]) const {
#pragma unroll
    for (int c = 0; c < UP_CHUNKS; ++c) {
      const uint4 low = stream.low(stage, c), high = stream.high(stage, c);
      mma_bf16(acc, low.x, high.x, low.y, high.y, column[c].x, column[c].y);
      mma_bf16(acc, low.z, high.z, low.w, high.w, column[c].z, column[c].w);
    }
  }
  // `unique`: how many experts are chosen; the lists are complete. Returns the stage behind the last one.
  template <class Next>
  DEVICE int run(int unique, Next& next_step) {
    total += unique * tiles;
#pragma unroll 1
    while (loaded < STAGES - 1) load(next_step);
    int stage = 0;
    if constexpr (GROUPS == 1) one_by_one(next_step, stage);
    else in_turns(next_step, stage);
    return stage;
  }

 private:
  // Few tokens' columns are near: no array of the next ones, for whose code there would be less room.
  template <class Next>
  DEVICE void one_by_one(Next& next_step, int& stage) {
    int turn = 0;
#pragma unroll 1
    for (int item = blockIdx.x; item < total; item += step, turn ^= 1) {
      const UpPlace place = place_at(item);
      const UpColumns columns = columns_of(place.unique);
      float acc[1][4];
      clear(acc);
#pragma unroll 1
      for (int pass = 0; pass < passes; ++pass) {
        uint4 held[UP_CHUNKS];
        load_column(columns.first, pass * UP_K + k_lane, held);
        load(next_step);
        stream.wait();
        multiply(stage, held, acc[0]);
        stream.step(stage);
      }
      finish(place, columns, acc, red + turn * red_floats);
    }
  }
  // Columns of the next pass are on their way while those of the present one are used.
  template <class Next>
  DEVICE void in_turns(Next& next_step, int& stage) {
    if (static_cast<int>(blockIdx.x) >= total) return;
    int turn = 0, item = blockIdx.x, pass = 0;
    UpPlace place = place_at(item);
    UpColumns columns = columns_of(place.unique);
    float acc[GROUPS][4];
    clear(acc);
    // One pass of a tile. Two arrays take turns: to copy one to the other would wait for its loads.
    const auto advance = [&](const uint4 (&held)[UP_CHUNKS], uint4 (&coming)[UP_CHUNKS]) {
      const bool is_last = pass + 1 == passes;
      UpPlace next_place = place;
      UpColumns next_columns = columns;
      if (is_last) {
        next_columns.first = nullptr;
        if (item + step < total) next_place = place_at(item + step), next_columns = columns_of(next_place.unique);
      }
      load_column(next_columns.first, (is_last ? 0 : pass + 1) * UP_K + k_lane, coming);
      const int groups = ceil_div(columns.count, TILE_COLS);
      const auto load_group = [&](int n, uint4 (&to)[UP_CHUNKS]) {
        const int at = n * TILE_COLS + g;
        load_column(at < columns.count ? column(columns, place.unique < 0, at) : nullptr, pass * UP_K + k_lane, to);
      };
      uint4 second[UP_CHUNKS], third[UP_CHUNKS];  // groups of eight
      if (groups > 1) load_group(1, second);
      if (groups > 2) load_group(2, third);
      load(next_step);
      stream.wait();
      multiply(stage, held, acc[0]);
      if (groups > 1) multiply(stage, second, acc[1]);
      if (groups > 2) multiply(stage, third, acc[2]);
      if (groups > 3) {
        load_group(3, second);
        multiply(stage, second, acc[3]);
      }
      stream.step(stage);
      if (!is_last) {
        ++pass;
        return true;
      }
      finish(place, columns, acc, red + turn * red_floats);
      clear(acc);
      turn ^= 1, pass = 0, item += step;
      place = next_place, columns = next_columns;
      return item < total;
    };
    uint4 even[UP_CHUNKS], odd[UP_CHUNKS];
    load_column(columns.first, k_lane, even);
    while (advance(even, odd) && advance(odd, even)) {}
  }
  // A tile's sums over the warps, and the activation.
  DEVICE void finish(const UpPlace& place, const UpColumns& columns, const float (&acc)[GROUPS][4], float* sums) const {
    const int count = columns.count, begin = columns.begin, groups = ceil_div(count, TILE_COLS);
    const bool is_shared = place.unique < 0;
#pragma unroll
    for (int n = 0; n < GROUPS; ++n)
      if (n < groups) store_tile(sums + (n * MOE_WARPS + warp) * RED_FLOATS, acc[n]);
    block_sync();  // one a tile: a warp that is ahead writes the other turn's sums
    const int n = threadIdx.x / 8, row = place.row0 + threadIdx.x % 8;  // 256 threads: 32 columns of 8 values
    u16 value = 0;
    if (n < count) {
      const float* tile = sums + n / TILE_COLS * MOE_WARPS * RED_FLOATS;
      float gate = sum_tile<MOE_WARPS>(tile, n % TILE_COLS, threadIdx.x % 8);
      float up = sum_tile<MOE_WARPS>(tile, n % TILE_COLS, threadIdx.x % 8 + 8);
      if (all_bias != nullptr && !is_shared) {
        const u16* bias = all_bias + static_cast<i64>(lists.ids[place.unique]) * 2 * width + row;
        gate += bf16_value(bias[0]);
        up += bf16_value(bias[width]);
      }
      value = bf16_bits(activate(activation, gate, up));
    }
    if (!writes_words) {
      if (n < count && is_shared) shared_act[static_cast<i64>(n) * shared_width + row] = value;
      else if (n < count) act[static_cast<i64>(lists.pair(begin + n)) * width + row] = value;
      return;
    }
    const u32 pair = value | static_cast<u32>(shfl_xor(static_cast<int>(value), 1)) << 16;
    if (n >= count || threadIdx.x & 1) return;
    const int at = is_shared ? routed_values + n * shared_width : lists.pair(begin + n) * width;
    store_relaxed_device(words + (at + row) / 2, static_cast<u64>(epoch) << 32 | pair);
  }
};
