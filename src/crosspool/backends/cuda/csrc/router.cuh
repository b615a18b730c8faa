// Which experts each of few tokens goes to, and for each expert the (token, choice) pairs that it serves: the parts that
// kernels share. Expert lists are in token order, so later sums have a fixed order. Arithmetic is fp32 throughout.
#pragma once
#include "crossing.cuh"

constexpr int ROUTER_WARPS = 8;
constexpr int ROUTER_THREADS = ROUTER_WARPS * 32;
constexpr int MAX_TOKENS = 32;
constexpr int MAX_EXPERTS = 512;
constexpr int HELD = 4;  // float4 of a weight row a lane keeps in registers: 4,096 elements over the block's warps

enum Score { SOFTMAX = 0, SIGMOID = 1, SOFTMAX_OF_TOPK = 2 };

struct RouterParams {
  const float* weight;       // (rows, hidden) fp32: experts, then the shared expert's gate where shared_scale is given
  const float* logit_bias;   // (experts) or null
  const float* choice_bias;  // (experts) or null
  const u16* x;              // (tokens, hidden) bf16
  float* logits;             // (tokens, rows) fp32
  int* ticket;               // one int, zero before the first launch; every launch leaves it zero
  float* shared_scale;       // (tokens) fp32 or null: sigmoid of the shared expert's gate
  int* topk_ids;             // (tokens, top_k)
  float* topk_weights;       // (tokens, top_k) fp32
  int* num_unique;           // one int
  int* unique_ids;           // (experts): the chosen experts, ascending
  int* unique_offsets;       // (experts + 1): where each chosen expert's pairs begin; one past the last: their number
  int* expert_pairs;         // (tokens * top_k): token * top_k + choice, grouped by expert, ascending within
  int tokens, experts, hidden, top_k;
  int score, num_groups, topk_groups, group_top2, renormalise;
  float renormalise_eps, scale;
  Arrival arrival;           // where `x` is a slot that a peer fills
};

// A float as an integer that orders the same way; NaN orders below all numbers.
DEVICE u32 orderable(float v) {
  const u32 bits = bits_of_float(v);
  if (v != v) return 0;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The lane with the best `v`, the lowest among equals. A lane without a candidate passes false.
DEVICE int best_lane(float v, bool is_candidate) {
  const u32 key = is_candidate ? orderable(v) : 0;
  return first_lane(key == warp_max_u32(key));
}

// Experts outside the best groups get -inf. `choice`: this warp's scores in shared memory.
DEVICE void mask_groups(const RouterParams& p, float* choice) {
  const int lane = threadIdx.x % 32, size = p.experts / p.num_groups;
  float mine = -__builtin_huge_valf();
  if (lane < p.num_groups) {
    float best = -__builtin_huge_valf(), second = best;
    for (int e = lane * size; e < (lane + 1) * size; ++e) {
      if (choice[e] > best) second = best, best = choice[e];
      else if (choice[e] > second) second = choice[e];
    }
    mine = p.group_top2 ? best + second : best;
  }
  bool kept = false;
  for (int round = 0; round < p.topk_groups; ++round) {
    if (lane == best_lane(mine, !kept && lane < p.num_groups)) kept = true;
  }
  if (lane < p.num_groups && !kept)
    for (int e = lane * size; e < (lane + 1) * size; ++e) choice[e] = -__builtin_huge_valf();
  warp_sync();
}

// Logits that an earlier kernel, or this one before a fence, left in device memory. A lane looks after PER_LANE neighbours.
struct LogitRow {
  const float* row;
  template <int PER_LANE>
  struct Look {
    float logits[PER_LANE];
  };
  template <int PER_LANE>
  DEVICE Look<PER_LANE> look(int experts) const {
    Look<PER_LANE> seen;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {  // all loads before the first use
      const int e = threadIdx.x % 32 * PER_LANE + i;
      seen.logits[i] = e < experts ? load_float_l2(row + e) : 0.0f;
    }
    return seen;
  }
  template <int PER_LANE>
  DEVICE void read(const Look<PER_LANE>& seen, float (&held)[PER_LANE], int experts) const {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      if (static_cast<int>(threadIdx.x % 32) * PER_LANE + i < experts) held[i] = seen.logits[i];
  }
};

// Logits that other blocks write meanwhile: each word holds a value and the launch's epoch, so that one look finds both.
struct LogitWords {
  const u64* row;
  u32 epoch;
  template <int PER_LANE>
  struct Look {
    u64 words[PER_LANE];
  };
  static DEVICE u64 word(float value, u32 epoch) { return static_cast<u64>(epoch) << 32 | bits_of_float(value); }
  template <int PER_LANE>
  DEVICE Look<PER_LANE> look(int experts) const {
    Look<PER_LANE> seen;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int e = threadIdx.x % 32 * PER_LANE + i;
      seen.words[i] = e < experts ? load_relaxed_device(row + e) : word(0.0f, epoch);
    }
    return seen;
  }
  // Looks again until all are there.
  template <int PER_LANE>
  DEVICE void read(Look<PER_LANE> seen, float (&held)[PER_LANE], int experts) const {
    while (true) {
      bool is_whole = true;
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) is_whole = is_whole && static_cast<u32>(seen.words[i] >> 32) == epoch;
      if (is_whole) break;
      spin();
      seen = look<PER_LANE>(experts);
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      if (static_cast<int>(threadIdx.x % 32) * PER_LANE + i < experts)
        held[i] = float_of_bits(static_cast<u32>(seen.words[i]));
  }
};

// ids: the experts of the `top_k` best keys, best first, the lowest expert among equals; a lane has PER_LANE neighbours.
template <int PER_LANE>
DEVICE void take_best(u32 (&keys)[PER_LANE], int* ids, int top_k) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int k = 0; k < top_k; ++k) {
    u32 mine = keys[0];
#pragma unroll
    for (int i = 1; i < PER_LANE; ++i) mine = keys[i] > mine ? keys[i] : mine;
    const u32 best = warp_max_u32(mine);
    if (lane == first_lane(mine == best)) {
      int found = 0;
#pragma unroll
      for (int i = PER_LANE - 1; i >= 0; --i) found = keys[i] == best ? i : found;
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) keys[i] = i == found ? 0 : keys[i];
      ids[k] = lane * PER_LANE + found;
    }
  }
}

// The same where a lane has few: it sorts them first, and then looks at the best of them only.
template <int PER_LANE>
DEVICE void take_best_sorted(u32 (&keys)[PER_LANE], int* ids, int top_k) {
  const int lane = threadIdx.x % 32;
  int expert[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) expert[i] = lane * PER_LANE + i;
#pragma unroll
  for (int pass = 1; pass < PER_LANE; ++pass)
#pragma unroll
    for (int i = PER_LANE - 1; i >= pass; --i) {  // only a larger key passes a lower expert
      const bool is_larger = keys[i] > keys[i - 1];
      const u32 key = keys[i];
      const int id = expert[i];
      keys[i] = is_larger ? keys[i - 1] : key, expert[i] = is_larger ? expert[i - 1] : id;
      keys[i - 1] = is_larger ? key : keys[i - 1], expert[i - 1] = is_larger ? id : expert[i - 1];
    }
#pragma unroll 1
  for (int k = 0; k < top_k; ++k) {
    const bool is_taken = lane == first_lane(keys[0] == warp_max_u32(keys[0]));
    if (is_taken) ids[k] = expert[0];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      keys[i] = !is_taken ? keys[i] : i + 1 < PER_LANE ? keys[i + 1 < PER_LANE ? i + 1 : i] : 0;
      expert[i] = is_taken && i + 1 < PER_LANE ? expert[i + 1 < PER_LANE ? i + 1 : i] : expert[i];
    }
  }
}

// One warp, one token: scores, choice, weights. `choice` and `scores` are this warp's rows of shared memory; a lane
// looks after PER_LANE neighbouring experts. seen: a look at the token's logits.
template <int PER_LANE, class Logits, class Look>
DEVICE void choose(const RouterParams& p, const Logits& logits, const Look& seen, int token, float* choice, float* scores,
                   int* chosen) {
  const int lane = threadIdx.x % 32;
  float held[PER_LANE], bias[PER_LANE], top = -__builtin_huge_valf();
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int e = lane * PER_LANE + i;
    held[i] = -__builtin_huge_valf();
    bias[i] = p.logit_bias != nullptr && e < p.experts ? p.logit_bias[e] : 0.0f;
  }
  logits.read(seen, held, p.experts);
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) held[i] += bias[i];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) top = fmaxf(top, held[i]);
  top = warp_max(top);
  if (p.score == SOFTMAX) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) sum += held[i] = exp_full(held[i] - top);
    const float scale = reciprocal(warp_sum(sum));
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) held[i] *= scale;
  } else if (p.score == SIGMOID) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) held[i] = reciprocal(1.0f + exp_full(-held[i]));
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int e = lane * PER_LANE + i;
    if (e >= p.experts) continue;
    scores[e] = held[i];
    if (p.choice_bias != nullptr) held[i] += p.choice_bias[e];
    if (p.num_groups > 1) choice[e] = held[i];
  }
  warp_sync();
  if (p.num_groups > 1) {
    mask_groups(p, choice);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      if (lane * PER_LANE + i < p.experts) held[i] = choice[lane * PER_LANE + i];
  }

  u32 keys[PER_LANE];  // order as the values do, NaN last; 0: chosen, or no expert
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const u32 key = orderable(held[i]);
    keys[i] = lane * PER_LANE + i >= p.experts ? 0 : key > 0 ? key : 1;
  }
  int* ids = chosen + token * p.top_k;
  if constexpr (PER_LANE <= 4) take_best_sorted(keys, ids, p.top_k);
  else take_best(keys, ids, p.top_k);
  warp_sync();
  const int id = lane < p.top_k ? ids[lane] : 0;
  float weight = lane < p.top_k ? scores[id] : 0.0f;  // of choice `lane`
  if (p.score == SOFTMAX_OF_TOPK) {
    const float most = warp_max(lane < p.top_k ? weight : -__builtin_huge_valf());
    weight = lane < p.top_k ? exp_full(weight - most) : 0.0f;
    weight *= reciprocal(warp_sum(weight));
  }
  if (p.renormalise) {
    const float sum = warp_sum(lane < p.top_k ? weight : 0.0f);
    weight *= reciprocal(fmaxf(sum + p.renormalise_eps, 1e-37f));
  }
  if (lane < p.top_k) {
    p.topk_ids[token * p.top_k + lane] = id;
    p.topk_weights[token * p.top_k + lane] = weight * p.scale;
  }
  warp_sync();  // the next token overwrites the scores
}

// One token's lists: a choice's place is the number of smaller ids, and of the same id before it (as in `list_experts`).
DEVICE void list_one_token(const RouterParams& p, const int* chosen) {
  const int k = threadIdx.x;
  if (k > p.top_k) return;
  p.unique_offsets[k] = k;
  if (k == p.top_k) {
    *p.num_unique = k;
    return;
  }
  int place = 0;
#pragma unroll 8
  for (int other = 0; other < p.top_k; ++other) place += chosen[other] < chosen[k] + (other < k);
  p.unique_ids[place] = chosen[k];
  p.expert_pairs[place] = k;
}

struct RouterSmem {
  float* choice;  // ROUTER_WARPS * MAX_EXPERTS
  float* scores;  // ROUTER_WARPS * MAX_EXPERTS
  float* sums;    // MAX_TOKENS * ROUTER_WARPS
  int* chosen;    // MAX_TOKENS * 32
  int* counts;    // MAX_EXPERTS
  int* last;      // 1
};
DEVICE RouterSmem router_smem(void* smem) {
  float* f = static_cast<float*>(smem);
  RouterSmem s;
  s.choice = f;
  s.scores = s.choice + ROUTER_WARPS * MAX_EXPERTS;
  s.sums = s.scores + ROUTER_WARPS * MAX_EXPERTS;
  s.chosen = reinterpret_cast<int*>(s.sums + MAX_TOKENS * ROUTER_WARPS);
  s.counts = s.chosen + MAX_TOKENS * 32;
  s.last = s.counts + MAX_EXPERTS;
  return s;
}

// An id that came from elsewhere; where its rows were given up, it may be anything.
DEVICE int known_expert(const RouterParams& p, u32 id) { return id < static_cast<u32>(p.experts) ? static_cast<int>(id) : 0; }

// From `s.chosen`, (tokens, top_k): the pairs grouped by expert, experts ascending, pairs in token order. A token's experts
// are all different, but where its rows were given up: such lists hold what they may hold, whichever of its pairs.
DEVICE void list_experts(const RouterParams& p, const RouterSmem& s) {
  if (p.tokens == 1) return list_one_token(p, s.chosen);
  const int lane = threadIdx.x % 32, pairs = p.tokens * p.top_k;
  int* const tokens = s.counts;                           // of an expert: a bit each
  int* const starts = reinterpret_cast<int*>(s.choice);  // its first pair's place
#pragma unroll 1
  for (int e = threadIdx.x; e < p.experts; e += ROUTER_THREADS) tokens[e] = 0;
  block_sync();
#pragma unroll 1
  for (int pair = threadIdx.x; pair < pairs; pair += ROUTER_THREADS) atomic_or(tokens + s.chosen[pair], 1 << pair / p.top_k);
  block_sync();
  if (threadIdx.x < 32) {  // a lane looks after neighbours; one sum carries pairs (high half) and experts (low half)
    const int each = ceil_div(p.experts, 32), end = min_int((lane + 1) * each, p.experts);
    int mine = 0;
#pragma unroll 1
    for (int e = lane * each; e < end; ++e)
      if (tokens[e] != 0) mine += (count_bits(tokens[e]) << 16) + 1;
    int sum = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {  // inclusive over the lanes
      const int other = shfl(sum, lane >= step ? lane - step : lane);
      if (lane >= step) sum += other;
    }
    if (lane == 31) {
      *p.num_unique = sum & 0xffff;
      p.unique_offsets[sum & 0xffff] = sum >> 16;
    }
#pragma unroll 1
    for (int e = lane * each, before = sum - mine; e < end; ++e) {
      if (tokens[e] == 0) continue;
      p.unique_ids[before & 0xffff] = e;
      p.unique_offsets[before & 0xffff] = starts[e] = before >> 16;
      before += (count_bits(tokens[e]) << 16) + 1;
    }
  }
  block_sync();
#pragma unroll 1
  for (int pair = threadIdx.x; pair < pairs; pair += ROUTER_THREADS) {
    const int e = s.chosen[pair], earlier = tokens[e] & ((1 << pair / p.top_k) - 1);
    p.expert_pairs[starts[e] + count_bits(earlier)] = pair;
  }
}

// One row of the router's weight, the block's threads side by side, and its products with every token.
struct RouterRow {
  static constexpr int STEP = ROUTER_THREADS * 4, AT_ONCE = 4;
  const float* weight;
  float4 held[HELD];

  DEVICE RouterRow(const RouterParams& p, int row) : weight(p.weight + static_cast<i64>(row) * p.hidden) {
#pragma unroll
    for (int c = 0; c < HELD; ++c) {
      const int i = c * STEP + threadIdx.x * 4;
      held[c] = i < p.hidden ? load_float4(weight + i) : float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
  }
  static DEVICE float product(float4 w, uint2 v) {
    return w.x * bf16_low(v.x) + w.y * bf16_high(v.x) + w.z * bf16_low(v.y) + w.w * bf16_high(v.y);
  }
  // This thread's pieces of tokens from t0 on; zeros where there are none.
  static DEVICE void load(const RouterParams& p, int t0, uint2 (&to)[AT_ONCE][HELD]) {
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n)
#pragma unroll
      for (int c = 0; c < HELD; ++c) {
        const int i = c * STEP + threadIdx.x * 4;
        to[n][c] = uint2{0, 0};
        if (t0 + n < p.tokens && i < p.hidden) to[n][c] = load8(p.x + static_cast<i64>(t0 + n) * p.hidden + i);
      }
  }
  // Products of elements that are not held: of longer rows than usual.
  DEVICE void add_beyond(const RouterParams& p, int t0, float (&sum)[AT_ONCE]) const {
#pragma unroll 1
    for (int i = HELD * STEP + threadIdx.x * 4; i < p.hidden; i += STEP) {
      const float4 w = load_float4(weight + i);
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n)
        if (t0 + n < p.tokens) sum[n] += product(w, load8(p.x + static_cast<i64>(t0 + n) * p.hidden + i));
    }
  }
  // The row's logit of every token (or the shared expert's scale) to device memory: `put(token, logit)`.
  template <class Put>
  DEVICE void logits(const RouterParams& p, int row, float* sums, const Put& put) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint2 coming[AT_ONCE][HELD];
    load(p, 0, coming);
#pragma unroll 1
    for (int t0 = 0; t0 < p.tokens; t0 += AT_ONCE) {
      float sum[AT_ONCE];
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n) {
        sum[n] = 0.0f;
#pragma unroll
        for (int c = 0; c < HELD; ++c) sum[n] += product(held[c], coming[n][c]);
      }
      if (p.hidden > HELD * STEP) add_beyond(p, t0, sum);
      if (t0 + AT_ONCE < p.tokens) load(p, t0 + AT_ONCE, coming);
#pragma unroll
      for (int mask = 16; mask; mask >>= 1)
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) sum[n] += shfl_xor(sum[n], mask);
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n)
        if (lane == n && t0 + n < p.tokens) sums[(t0 + n) * ROUTER_WARPS + warp] = sum[n];
    }
    block_sync();
#pragma unroll 1
    for (int t = threadIdx.x; t < p.tokens; t += ROUTER_THREADS) {
      float sum = 0.0f;
      for (int w = 0; w < ROUTER_WARPS; ++w) sum += sums[t * ROUTER_WARPS + w];
      if (row < p.experts) put(t, sum);
      else p.shared_scale[t] = 1.0f / (1.0f + exp_full(-sum));
    }
    block_sync();
  }
};

// Several rows of the router's weight and a part of many tokens: every block would else read all of them. A logit's sum has the
// same order as `RouterRow` gives it.
struct RouterTile {
  static constexpr int ROWS = 4, AT_ONCE = 4, PIECES = 2, STEP = ROUTER_THREADS * 4;
  const RouterParams& p;
  const int rows, row0, begin, end;  // of the router, and this tile's first; tokens

  // How many tiles there are over one group of rows, where `blocks` share the work.
  static DEVICE int num_groups(int tokens, int rows, int blocks) {
    return max_int(1, min_int(ceil_div(tokens, AT_ONCE), blocks / ceil_div(rows, ROWS)));
  }
  static DEVICE int num_tiles(int tokens, int rows, int blocks) {
    return ceil_div(rows, ROWS) * num_groups(tokens, rows, blocks);
  }
  static DEVICE RouterTile at(const RouterParams& p, int rows, int tile, int blocks) {
    const int groups = num_groups(p.tokens, rows, blocks), each = ceil_div(p.tokens, groups), group = tile % groups;
    return RouterTile{p, rows, tile / groups * ROWS, min_int(group * each, p.tokens), min_int((group + 1) * each, p.tokens)};
  }
  // `put(token, row, logit)`; sums: ROWS * MAX_TOKENS * ROUTER_WARPS.
  template <class Put>
  DEVICE void logits(float* sums, const Put& put) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int t0 = begin; t0 < end; t0 += AT_ONCE) {
      float sum[ROWS][AT_ONCE] = {};
#pragma unroll 1
      for (int i0 = threadIdx.x * 4; i0 < p.hidden; i0 += PIECES * STEP) {
        float4 w[ROWS][PIECES];
        uint2 x[AT_ONCE][PIECES];
#pragma unroll
        for (int c = 0; c < PIECES; ++c) {
          const int i = i0 + c * STEP;
#pragma unroll
          for (int n = 0; n < AT_ONCE; ++n) {
            x[n][c] = uint2{0, 0};
            if (t0 + n < end && i < p.hidden) x[n][c] = load8(p.x + static_cast<i64>(t0 + n) * p.hidden + i);
          }
#pragma unroll
          for (int r = 0; r < ROWS; ++r) {
            w[r][c] = float4{0.0f, 0.0f, 0.0f, 0.0f};
            if (row0 + r < rows && i < p.hidden) w[r][c] = load_float4(p.weight + static_cast<i64>(row0 + r) * p.hidden + i);
          }
        }
#pragma unroll
        for (int c = 0; c < PIECES; ++c)
#pragma unroll
          for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) sum[r][n] += RouterRow::product(w[r][c], x[n][c]);
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) sum[r][n] = warp_sum(sum[r][n]);
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n)
          if (lane == r * AT_ONCE + n && t0 + n < end) sums[((t0 + n - begin) * ROWS + r) * ROUTER_WARPS + warp] = sum[r][n];
    }
    block_sync();
#pragma unroll 1
    for (int i = threadIdx.x; i < (end - begin) * ROWS; i += ROUTER_THREADS) {
      const int t = begin + i / ROWS, row = row0 + i % ROWS;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < ROUTER_WARPS; ++w) sum += sums[i * ROUTER_WARPS + w];
      if (row < p.experts) put(t, row, sum);
      else if (row < rows) p.shared_scale[t] = 1.0f / (1.0f + exp_full(-sum));
    }
    block_sync();
  }
};

// The tokens of this warp; it looks at the next one's logits while it chooses.
template <int PER_LANE, class Row>
DEVICE void choose_own(const RouterParams& p, const RouterSmem& s, const Row& row) {
  const int warp = threadIdx.x / 32;
  float *choice = s.choice + warp * MAX_EXPERTS, *scores = s.scores + warp * MAX_EXPERTS;
  if (warp >= p.tokens) return;
  auto seen = row(warp).template look<PER_LANE>(p.experts);
#pragma unroll 1
  for (int t = warp; t < p.tokens; t += ROUTER_WARPS) {
    auto coming = seen;
    if (t + ROUTER_WARPS < p.tokens) coming = row(t + ROUTER_WARPS).template look<PER_LANE>(p.experts);
    choose<PER_LANE>(p, row(t), seen, t, choice, scores, s.chosen);
    seen = coming;
  }
}

// Ids and weights of every token to where `p` points. `row(token)`: the token's logits.
template <class Row>
DEVICE void choose_tokens(const RouterParams& p, const RouterSmem& s, const Row& row) {
  if (p.experts <= 128) choose_own<4>(p, s, row);
  else choose_own<MAX_EXPERTS / 32>(p, s, row);
  block_sync();
}

// The same, and the lists.
template <class Row>
DEVICE void choose_all(const RouterParams& p, const RouterSmem& s, const Row& row) {
  choose_tokens(p, s, row);
  list_experts(p, s);
}

// One block's row of logits to all; true in the block that finds the others' too.
DEVICE bool is_last_of_logits(const RouterParams& p, const RouterSmem& s, const RouterRow& weight) {
  const int rows = gridDim.x, row = blockIdx.x;
  weight.logits(p, row, s.sums, [&](int t, float logit) { p.logits[t * rows + row] = logit; });
  if (threadIdx.x == 0) {
    device_fence();
    *s.last = atomic_add(p.ticket, 1) == rows - 1;
    device_fence();
  }
  block_sync();
  if (*s.last && threadIdx.x == 0) *p.ticket = 0;
  return *s.last;
}
