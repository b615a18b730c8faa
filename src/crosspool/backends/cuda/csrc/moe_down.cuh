// The down projection of the FFN of few tokens: a block computes sixteen rows of the output, from all experts.
//
// Which warp takes a unit is a matter of its expert alone, and a warp takes units in the order of experts: so a token's sum
// has one order, whichever experts the other tokens of the batch chose.
#pragma once
#include "moe_acts.cuh"

// A unit: DOWN_K elements of k, the `part`th of an expert, times eight of its activations from the `n0`th on. `unique`: which
// of the chosen experts; -1: the shared one; their number: none is left. Its activations: `count` from the `begin`th of the lists.
struct DownCursor {
  int unique, part, n0, begin, count;
};

// Down: one row tile of a block. Each warp takes an eighth of the units and keeps its own sums, added in warp order.
//
// Activations of more than eight tokens come the same way as weights: every lane copies the bytes of the column that it will
// multiply, as many units ahead. To load them into registers one unit ahead took longer than a unit where experts have several
// tokens. Those of few are loaded so: they have no room in shared memory, and one stage of weights more.
template <int STAGES>
struct DownStep {
  using DownStream = Stream<STAGES, DOWN_CHUNKS>;
  const MoeParams& p;
  const DownStream stream;
  const Lists lists;  // by value: a reference into the same object would keep all of it out of registers
  const float* weights;  // (tokens * top_k)
  float* sums;           // MOE_WARPS * tokens * OUT_STRIDE
  SharedAddress columns;  // this lane's first 16 bytes of activations: [stage][chunk][lane]
  Acts acts;
  // Of `p`, in registers: within the server `p` is in shared memory, and would be read again at every use.
  const int tokens, hidden, width, shared_width;
  const u16 *routed_down, *shared_down, *bias;
  const float* shared_scale;
  const int shared_parts, parts;  // units of the shared expert, and of each other one
  const int unique;  // how many experts are chosen
  int warp, g, q, k_lane;
  int row0 = 0, stage = 0, load_stage = 0;  // stage: of the next unit
  DownCursor ahead{};

  // near: room for COLUMN_BYTES, or for the activations of few tokens.
  DEVICE DownStep(const MoeParams& p, u8* smem, u8* near, const Lists& lists, const float* weights, float* sums, int unique)
      : p(p), stream(smem), lists(lists), weights(weights), sums(sums),
        columns(shared_address(near + threadIdx.x / 32 * (COLUMN_BYTES / MOE_WARPS) + threadIdx.x % 32 * 16)), acts(p),
        tokens(p.tokens), hidden(p.hidden), width(p.width), shared_width(p.shared_width), routed_down(p.down),
        shared_down(p.shared_down), bias(p.down_bias), shared_scale(p.shared_scale),
        shared_parts(ceil_div(shared_width, DOWN_K)), parts(ceil_div(width, DOWN_K)), unique(unique),
        warp(threadIdx.x / 32), g(threadIdx.x % 32 / 4), q(threadIdx.x % 4), k_lane(q * 8) {}

  // A warp's first unit, and the one after `c`.
  DEVICE DownCursor start() const { return settle(DownCursor{-1, warp, 0, 0, tokens}); }
  DEVICE DownCursor after(DownCursor c) const {
    c.n0 += TILE_COLS;
    if (c.n0 < c.count) return c;
    c.n0 = 0, c.part += MOE_WARPS;
    return settle(c);
  }
  // Units of an expert go to warps in turn, from one on that depends on its number: experts of few units take turns.
  DEVICE DownCursor settle(DownCursor c) const {
    const int before = c.unique;
    while (c.unique < unique && c.part >= (c.unique < 0 ? shared_parts : parts)) {
      if (++c.unique < unique) c.part = (warp - lists.ids[c.unique] * parts) & (MOE_WARPS - 1);
    }
    if (c.unique == before || c.unique >= unique) return c;
    c.begin = c.unique, c.count = 1;
    if (tokens > 1) c.begin = lists.offsets[c.unique], c.count = lists.offsets[c.unique + 1] - c.begin;
    return c;
  }
  // Start copying a unit's weights; those of its first eight columns serve all.
  DEVICE void copy_weights(const DownCursor& c, int to) const {
    if (c.unique >= unique || c.n0 > 0) return;
    const bool is_shared = c.unique < 0;
    const int row = is_shared ? shared_width : width, k0 = c.part * DOWN_K, k = k0 + DownStream::copy_k();
    const u16* weight = is_shared ? shared_down : routed_down;
    const i64 first = (is_shared ? 0 : static_cast<i64>(lists.ids[c.unique]) * hidden) + row0 + DownStream::copy_row();
    const u16* low_row = weight + first * row + k;
    const u16* high_row = row0 + 8 < hidden ? low_row + 8 * row : low_row;  // of half a tile: anything
    if (k0 + DOWN_K <= row) stream.copy_whole(to, low_row, high_row, 4 * row);
    else stream.copy(to, low_row, high_row, 4 * row, k, row);
  }
  // The same of its activations. What lies in a column that does not exist only spoils the sums of that column.
  DEVICE void copy_columns(const DownCursor& c, int to) const {
    if (c.unique >= unique || c.n0 + g >= c.count) return;
    const bool is_shared = c.unique < 0;
    const int row = is_shared ? shared_width : width, k = c.part * DOWN_K + k_lane, at = c.n0 + g;
    const u16* from = is_shared ? acts.shared + at * row : acts.routed + lists.pair(c.begin + at) * row;
#pragma unroll
    for (int n = 0; n < DOWN_CHUNKS; ++n) {
      const bool inside = k + n * 32 < row;
      copy_async16(columns + (to * DOWN_CHUNKS + n) * 512, inside ? from + k + n * 32 : from, inside);
    }
  }
  // Start copying the next unit's weights alone; nothing where there is none.
  DEVICE void copy_next(int to) {
    copy_weights(ahead, to);
    if (ahead.unique < unique) ahead = after(ahead);
  }
  DEVICE void load() {
    copy_columns(ahead, load_stage);
    copy_next(load_stage);
    copy_async_commit();
    stream.step(load_stage);
  }
  // Activations of the units whose weights are on their way already.
  DEVICE void load_columns() const {
    DownCursor c = start();
    int to = stage;
  #pragma unroll 1
    for (int n = 0; n < STAGES; ++n) {
      copy_columns(c, to);
      copy_async_commit();
      if (c.unique < unique) c = after(c);
      stream.step(to);
    }
  }
  // Which rows; where there is no such tile, nothing is copied.
  DEVICE void choose_tile(int row_tile) {
    row0 = row_tile * TILE_ROWS;
    ahead = row0 < hidden ? start() : DownCursor{unique, 0, 0, 0, 0};
  }
  // Start on a row tile: weights alone, of all stages or the first few; the activations need not be there yet.
  DEVICE void begin(int row_tile, int stages = STAGES) {
    choose_tile(row_tile);
    clear_sums();
    stage = load_stage = 0;
    load_more(stages);
  }
  DEVICE void load_more(int stages) {
  #pragma unroll 1
    for (int n = 0; n < stages; ++n) load_weights();
  }
  // The same where all stages but one are on their way, the first of them in `first_stage`.
  DEVICE void go_on(int first_stage) {
    clear_sums();
    stage = first_stage, load_stage = first_stage == 0 ? STAGES - 1 : first_stage - 1;
    load_weights();
  }
  DEVICE void load_weights() {
    copy_next(load_stage);
    copy_async_commit();
    stream.step(load_stage);
  }
  DEVICE void clear_sums() const {
    float* out = sums + warp * tokens * OUT_STRIDE;
  #pragma unroll 1
    for (int i = threadIdx.x % 32; i < tokens * OUT_STRIDE; i += 32) out[i] = 0.0f;
    warp_sync();
  }
  DEVICE void add_bias(int unique, float& low_sum, float& high_sum) const {
    const u16* expert = bias + static_cast<i64>(lists.ids[unique]) * hidden;
    low_sum += bf16_value(expert[row0 + g]);
    high_sum += bf16_value(expert[min_int(row0 + g + 8, hidden - 1)]);
  }
  // A unit's weights times eight columns, in two chains, which are shorter.
  DEVICE void products(const uint4 (&low_rows)[DOWN_CHUNKS], const uint4 (&high_rows)[DOWN_CHUNKS],
                       const uint4 (&column)[DOWN_CHUNKS], float (&acc)[2][4]) const {
  #pragma unroll
    for (int c = 0; c < DOWN_CHUNKS; ++c) {
      mma_bf16(acc[0], low_rows[c].x, high_rows[c].x, low_rows[c].y, high_rows[c].y, column[c].x, column[c].y);
      mma_bf16(acc[1], low_rows[c].z, high_rows[c].z, low_rows[c].w, high_rows[c].w, column[c].z, column[c].w);
    }
  }
  DEVICE void load_rows(uint4 (&low_rows)[DOWN_CHUNKS], uint4 (&high_rows)[DOWN_CHUNKS]) const {
  #pragma unroll
    for (int c = 0; c < DOWN_CHUNKS; ++c) low_rows[c] = stream.low(stage, c), high_rows[c] = stream.high(stage, c);
  }
  // epoch: of words.
  DEVICE void run(u32 epoch) {
    float* out = sums + warp * tokens * OUT_STRIDE + g;
    uint4 low_rows[DOWN_CHUNKS], high_rows[DOWN_CHUNKS], column[DOWN_CHUNKS];
    load_columns();
    for (DownCursor at = start(); at.unique < unique; at = after(at), stream.step(stage)) {
      const bool is_shared = at.unique < 0;
      int token[2];  // of columns 2q and 2q + 1; -1: none
      float w[2];
  #pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int n = at.n0 + 2 * q + c;
        token[c] = -1, w[c] = 1.0f;
        if (n >= at.count) continue;
        token[c] = is_shared ? n : lists.token(at.begin + n);
        if (!is_shared) w[c] = weights[lists.pair(at.begin + n)];
        else if (shared_scale != nullptr) w[c] = load_float_l2(shared_scale + n);
      }
      stream.wait();
      if (at.n0 == 0) load_rows(low_rows, high_rows);
  #pragma unroll
      for (int c = 0; c < DOWN_CHUNKS; ++c) column[c] = load16_shared(columns + (stage * DOWN_CHUNKS + c) * 512);
      float acc[2][4] = {};
      products(low_rows, high_rows, column, acc);
      load();
  #pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (token[c] < 0) continue;
        float low_sum = acc[0][c] + acc[1][c], high_sum = acc[0][c + 2] + acc[1][c + 2];
        if (bias != nullptr && !is_shared && at.part == 0) add_bias(at.unique, low_sum, high_sum);
        out[token[c] * OUT_STRIDE] += w[c] * low_sum;
        out[token[c] * OUT_STRIDE + 8] += w[c] * high_sum;
      }
      warp_sync();
    }
    finish(epoch);
  }
  // The same for few tokens: each has a column of its own, zero for experts that it does not go to, so that sums stay in
  // registers. Two arrays of columns take turns: to copy one to the other would wait for its loads.
  DEVICE void run_few(const TokenTable& table, u32 epoch) {
    float sum[4] = {};  // rows `low` and `high` of tokens 2q and 2q + 1
    DownCursor at = start();
    uint4 even[DOWN_CHUNKS], odd[DOWN_CHUNKS];
    const auto advance = [&](const uint4 (&held)[DOWN_CHUNKS], uint4 (&coming)[DOWN_CHUNKS]) {
      const DownCursor next = after(at);
      load_column(table, next, coming);
      float w[2];
      weights_of(table, at, w);
      stream.wait();
      uint4 low_rows[DOWN_CHUNKS], high_rows[DOWN_CHUNKS];
      load_rows(low_rows, high_rows);
      float acc[2][4] = {};
      products(low_rows, high_rows, held, acc);
      load_weights();
      stream.step(stage);
      const bool has_bias = bias != nullptr && at.unique >= 0 && at.part == 0;
  #pragma unroll
      for (int c = 0; c < 2; ++c) {
        float low_sum = acc[0][c] + acc[1][c], high_sum = acc[0][c + 2] + acc[1][c + 2];
        if (has_bias) add_bias(at.unique, low_sum, high_sum);
        sum[c] += w[c] * low_sum;
        sum[c + 2] += w[c] * high_sum;
      }
      at = next;
      return at.unique < unique;
    };
    load_column(table, at, even);
    if (at.unique < unique)
      while (advance(even, odd) && advance(odd, even)) {}
    float* out = sums + warp * tokens * OUT_STRIDE;
  #pragma unroll
    for (int c = 0; c < 2; ++c)
      if (2 * q + c < tokens) out[(2 * q + c) * OUT_STRIDE + g] = sum[c], out[(2 * q + c) * OUT_STRIDE + g + 8] = sum[c + 2];
    finish(epoch);
  }
  // The same for one token, whose activations are near: there is one column, and sums stay in registers.
  DEVICE void run_one(u32 epoch) {
    const SharedAddress routed = shared_address(acts.routed + k_lane), shared = shared_address(acts.shared + k_lane);
    float low_sum = 0.0f, high_sum = 0.0f;
    for (DownCursor at = start(); at.unique < unique; at = after(at), stream.step(stage)) {
      const bool is_shared = at.unique < 0;
      const int k0 = at.part * DOWN_K, row = is_shared ? shared_width : width, pair = is_shared ? 0 : lists.pair(at.unique);
      const SharedAddress from = is_shared ? shared + 2 * k0 : routed + 2 * (pair * width + k0);
      float w = is_shared ? 1.0f : weights[pair];
      if (is_shared && shared_scale != nullptr) w = load_float_l2(shared_scale);
      uint4 column[DOWN_CHUNKS], low_rows[DOWN_CHUNKS], high_rows[DOWN_CHUNKS];
  #pragma unroll
      for (int c = 0; c < DOWN_CHUNKS; ++c) {
        column[c] = uint4{0, 0, 0, 0};
        if (g == 0 && k0 + k_lane + c * 32 < row) column[c] = load16_shared(from + c * 64);
      }
      stream.wait();
      load_rows(low_rows, high_rows);
      float acc[2][4] = {};
      products(low_rows, high_rows, column, acc);
      load_weights();
      float low_value = acc[0][0] + acc[1][0], high_value = acc[0][2] + acc[1][2];
      if (bias != nullptr && !is_shared && k0 == 0) add_bias(at.unique, low_value, high_value);
      low_sum += w * low_value, high_sum += w * high_value;
    }
    float* out = sums + warp * OUT_STRIDE;
    if (q == 0) out[g] = low_sum, out[g + 8] = high_sum;
    finish(epoch);
  }

 private:
  // Of `run_few`: this lane's part of token g's column of a unit.
  DEVICE void load_column(const TokenTable& table, const DownCursor& c, uint4 (&to)[DOWN_CHUNKS]) const {
  #pragma unroll
    for (int n = 0; n < DOWN_CHUNKS; ++n) to[n] = uint4{0, 0, 0, 0};
    if (c.unique >= unique || g >= tokens) return;
    const bool is_shared = c.unique < 0;
    const int pair = is_shared ? 0 : table.pairs[c.unique * TokenTable::TOKENS + g];
    if (pair < 0) return;
    const int row = is_shared ? shared_width : width, k = c.part * DOWN_K + k_lane, k_end = min_int((c.part + 1) * DOWN_K, row);
    const u16* from = is_shared ? acts.shared + g * shared_width : acts.routed + pair * width;
  #pragma unroll
    for (int n = 0; n < DOWN_CHUNKS; ++n)
      if (k + n * 32 < k_end) to[n] = load16(from + k + n * 32);
  }
  // Of `run_few`: weights of tokens 2q and 2q + 1.
  DEVICE void weights_of(const TokenTable& table, const DownCursor& c, float (&w)[2]) const {
  #pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int token = 2 * q + n;
      if (c.unique >= 0) w[n] = table.weights[c.unique * TokenTable::TOKENS + token];
      else w[n] = shared_scale != nullptr && token < tokens ? load_float_l2(shared_scale + token) : 1.0f;
    }
  }
  // The sums of all warps, in their order.
  DEVICE void finish(u32 epoch) {
    block_sync();
    const int form = p.out_form;
    void* const all = p.out;
  #pragma unroll 1
    for (int i = threadIdx.x; i < tokens * TILE_ROWS; i += MOE_THREADS) {
      const int token = i / TILE_ROWS, row = row0 + i % TILE_ROWS;
      if (row >= hidden) continue;
      float v = 0.0f;
  #pragma unroll
      for (int w = 0; w < MOE_WARPS; ++w) v += sums[(w * tokens + token) * OUT_STRIDE + i % TILE_ROWS];
      const i64 at = static_cast<i64>(token) * hidden + row;
      if (form == WORDS) store_word(static_cast<u64*>(all) + at, sum_word(v, epoch));
      else if (form == FP32) static_cast<float*>(all)[at] = v;
      else static_cast<u16*>(all)[at] = bf16_bits(v);
    }
    block_sync();  // before the next row tile clears the sums
  }
};
