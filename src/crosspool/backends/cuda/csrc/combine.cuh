// The merge of a token's splits: 128 values of one head a block.
#pragma once
#include "attention.cuh"

struct CombineParams {
  const float* partial_o;
  const float* partial_ml;
  const u16* sinks;    // (heads) bf16 or null: a logit that joins the sum alone
  const int* lengths;  // (tokens), with the next three as the split pass had them
  u16* out;            // (tokens, heads, value_dim) bf16
  int window, few_splits, tile;
  int heads, splits, value_dim;
};

constexpr int COMBINE_THREADS = 256;
constexpr int COMBINE_WARPS = COMBINE_THREADS / 32;
constexpr int COMBINE_VALUES = 128;  // of one head, a block: a lane's four
constexpr int COMBINE_AHEAD = 8;     // splits a warp reads at once
constexpr int COMBINE_SMEM = COMBINE_WARPS * (COMBINE_VALUES + 2) * 4;

// A warp takes every eighth split, with its own maximum and sum, then the warps' are merged. Which splits have slots is
// known before the wait for the kernel before, so one round of loads brings up to 64.
struct MergedSplits {
  const float* o;
  const float* ml;
  int used;
  float sink;

  // Values from `first_value` on.
  DEVICE MergedSplits(const CombineParams& p, i64 token, int head, int first_value) {
    const int d = first_value + static_cast<int>(threadIdx.x) % 32 * 4;
    const i64 first = token * p.splits * p.heads + head;
    grid_launch_dependents();
    used = Splits::of(p, p.lengths[token], p.tile).used;
    sink = p.sinks != nullptr ? bf16_value(p.sinks[head]) * 1.4426950408889634f : NEG_INF;
    o = p.partial_o + first * p.value_dim + min_int(d, p.value_dim - 4);
    ml = p.partial_ml + first * 2;
  }

  // Waits; then value threadIdx.x, in the first COMBINE_VALUES threads. smem: COMBINE_SMEM bytes.
  DEVICE float value(const CombineParams& p, u8* smem) const {
    float* values = reinterpret_cast<float*>(smem);            // (COMBINE_WARPS, COMBINE_VALUES)
    float* tops = values + COMBINE_WARPS * COMBINE_VALUES;     // (COMBINE_WARPS)
    float* sums = tops + COMBINE_WARPS;                        // (COMBINE_WARPS)
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    grid_wait();
    float top = NEG_INF, sum = 0.0f;
    float4 acc = float4{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int s0 = warp; s0 < used; s0 += COMBINE_WARPS * COMBINE_AHEAD) add(p, s0, top, sum, acc);
    *reinterpret_cast<float4*>(values + warp * COMBINE_VALUES + lane * 4) = acc;
    if (lane == 0) tops[warp] = top, sums[warp] = sum;
    block_sync();
    if (threadIdx.x >= COMBINE_VALUES) return 0.0f;
    float most = sink;
#pragma unroll
    for (int w = 0; w < COMBINE_WARPS; ++w) most = fmaxf(most, tops[w]);
    const float base = most == NEG_INF ? 0.0f : most;
    float value = 0.0f, total = p.sinks != nullptr ? exp2_fast(sink - base) : 0.0f;
#pragma unroll
    for (int w = 0; w < COMBINE_WARPS; ++w) {
      const float share = exp2_fast(tops[w] - base);
      value += share * values[w * COMBINE_VALUES + threadIdx.x];
      total += share * sums[w];
    }
    return total > 0.0f ? value * reciprocal(total) : 0.0f;
  }

 private:
  // COMBINE_AHEAD splits of a warp, from `s0` on.
  DEVICE void add(const CombineParams& p, int s0, float& top, float& sum, float4& acc) const {
    uint2 pairs[COMBINE_AHEAD];
    float4 v[COMBINE_AHEAD];
#pragma unroll
    for (int i = 0; i < COMBINE_AHEAD; ++i) {  // a split read twice counts once
      const i64 at = static_cast<i64>(min_int(s0 + i * COMBINE_WARPS, used - 1)) * p.heads;
      pairs[i] = load8(ml + at * 2);
      v[i] = load_float4(o + at * p.value_dim);
    }
    float next = top;
#pragma unroll
    for (int i = 0; i < COMBINE_AHEAD; ++i) next = fmaxf(next, float_of_bits(pairs[i].x));
    const float base = next == NEG_INF ? 0.0f : next;  // no slot within the window yet
    const float shrink = exp2_fast(top - base);
    top = next;
    sum *= shrink;
    acc = float4{acc.x * shrink, acc.y * shrink, acc.z * shrink, acc.w * shrink};
#pragma unroll
    for (int i = 0; i < COMBINE_AHEAD; ++i) {
      const float w = s0 + i * COMBINE_WARPS < used ? exp2_fast(float_of_bits(pairs[i].x) - base) : 0.0f;
      sum += w * float_of_bits(pairs[i].y);
      acc = float4{acc.x + w * v[i].x, acc.y + w * v[i].y, acc.z + w * v[i].z, acc.w + w * v[i].w};
    }
  }
};
