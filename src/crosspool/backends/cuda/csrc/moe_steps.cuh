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
constexpr int OUT_STRIDE = 20;                   // floats a token takes in a warp's sums
constexpr int STREAM_BYTES = MOE_STAGES * 32768;  // of either step

// A warp's stages: [stage][chunk][row of the pair][lane] of 16 bytes.
template <int STAGES, int CHUNKS>
struct Stream {
  static constexpr int WARP_BYTES = STAGES * CHUNKS * 2 * 512;
  static constexpr int BYTES = MOE_WARPS * WARP_BYTES;
  SharedAddress mine;  // this lane's first 16 bytes

  DEVICE explicit Stream(u8* smem) : mine(shared_address(smem + threadIdx.x / 32 * WARP_BYTES + threadIdx.x % 32 * 16)) {}
  // Start copying this lane's part of two rows: chunks at k, k + 32, ...; zeros at and after k_end.
  DEVICE void copy(int stage, const u16* low_row, const u16* high_row, int k, int k_end) const {
    const SharedAddress to = mine + stage * CHUNKS * 1024;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const bool inside = k + c * 32 < k_end;
      copy_async16(to + c * 1024, inside ? low_row + k + c * 32 : low_row, inside);
      copy_async16(to + c * 1024 + 512, inside ? high_row + k + c * 32 : high_row, inside);
    }
  }
  // The same where all of it lies inside the rows; `low`, `high`: at this lane's first k.
  DEVICE void copy_whole(int stage, const u16* low, const u16* high) const {
    const SharedAddress to = mine + stage * CHUNKS * 1024;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      copy_async16(to + c * 1024, low + c * 32);
      copy_async16(to + c * 1024 + 512, high + c * 32);
    }
  }
  DEVICE uint4 low(int stage, int c) const { return load16_shared(mine + (stage * CHUNKS + c) * 1024); }
  DEVICE uint4 high(int stage, int c) const { return load16_shared(mine + (stage * CHUNKS + c) * 1024 + 512); }
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

// Which unit: DOWN_K elements of k, the `part`th of an expert; unique -1: of the shared one.
struct DownCursor {
  int unit, unique, part;
};

// What a unit is multiplied with: elements [k0, k0 + DOWN_K) of `count` activations of `width`.
struct DownUnit {
  int unique, k0, width;
  int begin, count;  // its pairs, or the tokens; count 0: no unit
};

// Where the down projection reads activations.
struct Acts {
  const u16 *routed, *shared;

  DEVICE explicit Acts(const MoeParams& p) : routed(p.act), shared(p.shared_act) {}
  // Shared memory that holds both, routed ones first.
  DEVICE Acts(const MoeParams& p, const u16* near) : routed(near), shared(near + p.tokens * p.top_k * p.width) {}
  DEVICE static int num_values(const MoeParams& p) { return p.tokens * (p.top_k * p.width + p.shared_width); }
  // This lane's part of column `at` of a unit; zeros past the last one.
  DEVICE void load(const Lists& lists, const DownUnit& u, int at, int k_lane, uint4 (&to)[DOWN_CHUNKS]) const {
#pragma unroll
    for (int c = 0; c < DOWN_CHUNKS; ++c) to[c] = uint4{0, 0, 0, 0};
    if (at >= u.count) return;
    const u16* row = (u.unique < 0 ? shared + at * u.width : routed + lists.pairs[u.begin + at] * u.width) + u.k0 + k_lane;
    if (u.k0 + DOWN_K <= u.width) {
#pragma unroll
      for (int c = 0; c < DOWN_CHUNKS; ++c) to[c] = load16(row + c * 32);
    } else {
#pragma unroll
      for (int c = 0; c < DOWN_CHUNKS; ++c)
        if (u.k0 + k_lane + c * 32 < u.width) to[c] = load16(row + c * 32);
    }
  }
};

// All activations of a layer to `near`, as soon as they are there; call block_sync afterwards. Where no wait holds layers
// apart (a pass given up, a profiler), words of the next one may be found: the result is void.
DEVICE void gather_words(const MoeParams& p, u32 epoch, u16* near) {
  constexpr int AT_ONCE = 6, STEP = MOE_THREADS * 2;
  const int words = Acts::num_values(p) / 2;
  for (int i0 = threadIdx.x * 2; i0 < words; i0 += STEP * AT_ONCE) {
    uint4 held[AT_ONCE];
    bool is_whole;
    do {
      is_whole = true;
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n)  // all loads before the first use
        held[n] = i0 + n * STEP < words ? load_words(p.act_words + i0 + n * STEP) : uint4{0, epoch, 0, epoch};
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n) is_whole = is_whole && held[n].y - epoch < 2 && held[n].w - epoch < 2;
      if (!is_whole) spin();
    } while (!is_whole);
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n)
      if (i0 + n * STEP < words) reinterpret_cast<uint2*>(near)[i0 / 2 + n * STEP / 2] = uint2{held[n].x, held[n].z};
  }
}

// The same, once all blocks have met.
DEVICE void gather(const MoeParams& p, u16* near) {
  const int routed = p.tokens * p.top_k * p.width, all = Acts::num_values(p);
  for (int i = threadIdx.x * 8; i < all; i += MOE_THREADS * 8)
    *reinterpret_cast<uint4*>(near + i) = load16(i < routed ? p.act + i : p.shared_act + (i - routed));
}

// Down: one row tile of a block. Each warp takes every eighth unit and keeps its own sums, added in warp order.
struct DownStep {
  using DownStream = Stream<DOWN_STAGES, DOWN_CHUNKS>;
  const MoeParams& p;
  const DownStream stream;
  const Lists lists;  // by value: a reference into the same object would keep all of it out of registers
  const float* weights;  // (tokens * top_k)
  float* sums;           // MOE_WARPS * tokens * OUT_STRIDE
  Acts acts;
  // Of `p`, in registers: within the server `p` is in shared memory, and would be read again at every use.
  const int tokens, hidden, width, shared_width;
  const u16 *routed_down, *shared_down, *bias;
  const float* shared_scale;
  int warp, g, q, k_lane, shared_units, parts, units;
  int row0 = 0, loaded = 0, load_stage = 0;
  DownCursor ahead{};
  int low = 0, high = 0;  // this lane's two rows

  DEVICE DownStep(const MoeParams& p, u8* smem, const Lists& lists, const float* weights, float* sums, int unique)
      : p(p), stream(smem), lists(lists), weights(weights), sums(sums), acts(p), tokens(p.tokens), hidden(p.hidden),
        width(p.width), shared_width(p.shared_width), routed_down(p.down), shared_down(p.shared_down), bias(p.down_bias),
        shared_scale(p.shared_scale), warp(threadIdx.x / 32), g(threadIdx.x % 32 / 4), q(threadIdx.x % 4), k_lane(q * 8),
        shared_units(ceil_div(shared_width, DOWN_K)), parts(ceil_div(width, DOWN_K)), units(shared_units + unique * parts) {}

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
    if (c.unit >= units) return DownUnit{};
    if (c.unique < 0) return DownUnit{-1, c.part * DOWN_K, shared_width, 0, tokens};
    const int begin = lists.offsets[c.unique];
    return DownUnit{c.unique, c.part * DOWN_K, width, begin, lists.offsets[c.unique + 1] - begin};
  }
  DEVICE void load() {
    if (ahead.unit < units) {
      const bool is_shared = ahead.unique < 0;
      const int row = is_shared ? shared_width : width, k0 = ahead.part * DOWN_K, k = k0 + k_lane;
      const u16* weight = is_shared ? shared_down : routed_down;
      const i64 first = is_shared ? low : static_cast<i64>(lists.ids[ahead.unique]) * hidden + low;
      const u16 *low_row = weight + first * row, *high_row = low_row + (high - low) * row;
      if (k0 + DOWN_K <= row) stream.copy_whole(load_stage, low_row + k, high_row + k);
      else stream.copy(load_stage, low_row, high_row, k, row);
    }
    copy_async_commit();
    ahead = after(ahead);
    ++loaded;
    if (++load_stage == DOWN_STAGES) load_stage = 0;
  }
  // Start on a row tile: weights alone, the activations need not be there yet.
  DEVICE void begin(int row_tile) {
    row0 = row_tile * TILE_ROWS;
    low = min_int(row0 + g, hidden - 1), high = min_int(row0 + g + 8, hidden - 1);
    ahead = start(), loaded = load_stage = 0;
    float* out = sums + warp * tokens * OUT_STRIDE;
    for (int i = threadIdx.x % 32; i < tokens * OUT_STRIDE; i += 32) out[i] = 0.0f;
    warp_sync();
    while (loaded < DOWN_STAGES) load();
  }
  // A unit's weights, in their stage, times eight columns; in two chains, which are shorter.
  DEVICE void products(int stage, const uint4 (&column)[DOWN_CHUNKS], float (&acc)[2][4]) const {
  #pragma unroll
    for (int c = 0; c < DOWN_CHUNKS; ++c) {
      const uint4 w_low = stream.low(stage, c), w_high = stream.high(stage, c);
      mma_bf16(acc[0], w_low.x, w_high.x, w_low.y, w_high.y, column[c].x, column[c].y);
      mma_bf16(acc[1], w_low.z, w_high.z, w_low.w, w_high.w, column[c].z, column[c].w);
    }
  }
  DEVICE void add_bias(int unique, float& low_sum, float& high_sum) const {
    const u16* expert = bias + static_cast<i64>(lists.ids[unique]) * hidden;
    low_sum += bf16_value(expert[low]);
    high_sum += bf16_value(expert[high]);
  }
  // The same onto this warp's sums.
  DEVICE void multiply(const DownUnit& u, int n0, int stage, const uint4 (&column)[DOWN_CHUNKS], float* out) const {
    float acc[2][4] = {};
    products(stage, column, acc);
  #pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int at = n0 + 2 * q + c;
      if (at >= u.count) continue;
      const bool is_shared = u.unique < 0;
      const int token = is_shared ? at : lists.tokens[u.begin + at];
      float w = 1.0f, low_sum = acc[0][c] + acc[1][c], high_sum = acc[0][c + 2] + acc[1][c + 2];
      if (!is_shared) w = weights[lists.pairs[u.begin + at]];
      else if (shared_scale != nullptr) w = load_float_l2(shared_scale + at);
      if (bias != nullptr && !is_shared && u.k0 == 0) add_bias(u.unique, low_sum, high_sum);
      out[token * OUT_STRIDE + g] += w * low_sum;
      out[token * OUT_STRIDE + g + 8] += w * high_sum;
    }
    warp_sync();
  }
  // epoch: of words.
  DEVICE void run(u32 epoch) {
    float* out = sums + warp * tokens * OUT_STRIDE;
    DownCursor at = start();
    DownUnit u = unit_at(at);
    uint4 held[DOWN_CHUNKS];  // the first group's columns, of this unit
    acts.load(lists, u, g, k_lane, held);
    for (int stage = 0; at.unit < units; stage = stage + 1 == DOWN_STAGES ? 0 : stage + 1) {
      at = after(at);
      const DownUnit next = unit_at(at);
      uint4 coming[DOWN_CHUNKS];
      acts.load(lists, next, g, k_lane, coming);
      copy_async_wait<DOWN_STAGES - 1>();
      for (int n0 = 0; n0 < u.count; n0 += TILE_COLS) {
        if (n0 > 0) acts.load(lists, u, n0 + g, k_lane, held);
        multiply(u, n0, stage, held, out);
      }
      load();
      u = next;
  #pragma unroll
      for (int c = 0; c < DOWN_CHUNKS; ++c) held[c] = coming[c];
    }
    finish(epoch);
  }
  // The same for one token, whose activations are near: there is one column, and sums stay in registers.
  DEVICE void run_one(u32 epoch) {
    const SharedAddress routed = shared_address(acts.routed + k_lane), shared = shared_address(acts.shared + k_lane);
    float low_sum = 0.0f, high_sum = 0.0f;
    DownCursor at = start();
    for (int stage = 0; at.unit < units; at = after(at), stage = stage + 1 == DOWN_STAGES ? 0 : stage + 1) {
      const bool is_shared = at.unique < 0;
      const int k0 = at.part * DOWN_K, row = is_shared ? shared_width : width, pair = is_shared ? 0 : lists.pairs[at.unique];
      const SharedAddress from = is_shared ? shared + 2 * k0 : routed + 2 * (pair * width + k0);
      float w = is_shared ? 1.0f : weights[pair];
      if (is_shared && shared_scale != nullptr) w = load_float_l2(shared_scale);
      uint4 held[DOWN_CHUNKS];
  #pragma unroll
      for (int c = 0; c < DOWN_CHUNKS; ++c) {
        held[c] = uint4{0, 0, 0, 0};
        if (g == 0 && k0 + k_lane + c * 32 < row) held[c] = load16_shared(from + c * 64);
      }
      copy_async_wait<DOWN_STAGES - 1>();
      float acc[2][4] = {};
      products(stage, held, acc);
      load();
      float low_value = acc[0][0] + acc[1][0], high_value = acc[0][2] + acc[1][2];
      if (bias != nullptr && !is_shared && k0 == 0) add_bias(at.unique, low_value, high_value);
      low_sum += w * low_value, high_sum += w * high_value;
    }
    float* out = sums + warp * OUT_STRIDE;
    if (q == 0) out[g] = low_sum, out[g + 8] = high_sum;
    finish(epoch);
  }

 private:
  // The sums of all warps, in their order.
  DEVICE void finish(u32 epoch) {
    block_sync();
    const int form = p.out_form;
    void* const all = p.out;
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
