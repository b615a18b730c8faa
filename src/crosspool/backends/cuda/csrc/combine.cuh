// The merge of a token's splits: 128 values of one head a block.
#pragma once
#include "attention.cuh"

struct CombineParams {
  const float* partial_o;
  const float* partial_ml;
  const u16* sinks;    // (heads) bf16 or null: a logit that joins the sum alone
  const int* lengths;  // (tokens), with the next three as the split pass had them
  u16* out;            // (tokens, heads, value_dim) bf16
  int window, few_splits, merge_blocks, tile;
  int heads, splits, value_dim;
};

constexpr int COMBINE_THREADS = 256;
constexpr int COMBINE_WARPS = COMBINE_THREADS / 32;
constexpr int COMBINE_VALUES = 128;  // of one head, a block: a lane's four
constexpr int COMBINE_AHEAD = 8;     // splits a warp reads at once
constexpr int COMBINE_SMEM = COMBINE_WARPS * (COMBINE_VALUES + 2) * 4;

// Sums of some splits: a maximum, and what a lane has of values.
struct PartialSums {
  float top = NEG_INF, sum = 0.0f;
  float4 acc = float4{0.0f, 0.0f, 0.0f, 0.0f};

  DEVICE void take(float other_top, float other_sum, const float4& v) {
    const Fold fold(top, other_top);
    sum = fold.of(sum, other_sum);
    acc = float4{fold.of(acc.x, v.x), fold.of(acc.y, v.y), fold.of(acc.z, v.z), fold.of(acc.w, v.w)};
    top = fold.top;
  }
};

// Who merges the splits of a group, one after another: there are none, the merge, or whichever block had them all.
enum SplitGroups { NO_GROUPS, GROUPS_HERE, GROUPS_ANYWHERE };

// A warp takes every eighth group, or split, then the warps' sums are merged. Which splits have slots is known before the wait
// for the kernel before, so one round of loads brings up to 64.
template <SplitGroups GROUPS>
struct MergedSplits {
  const float* o;
  const float* ml;
  int used;
  bool has_groups;  // a group's partial attention lies where its first split's would
  float sink;

  // Values from `first_value` on.
  DEVICE MergedSplits(const CombineParams& p, i64 token, int head, int first_value) {
    const int d = first_value + static_cast<int>(threadIdx.x) % 32 * 4;
    const i64 first = token * p.splits * p.heads + head;
    grid_launch_dependents();
    const Splits splits = Splits::of(p, p.lengths[token], p.tile);
    used = splits.used, has_groups = GROUPS == GROUPS_ANYWHERE && splits.merged(p.merge_blocks) > 1;
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
    const PartialSums own = GROUPS == NO_GROUPS ? of_splits(p)
                            : has_groups        ? of_groups<1>(p)
                                                : of_groups<SPLIT_GROUP>(p);
    *reinterpret_cast<float4*>(values + warp * COMBINE_VALUES + lane * 4) = own.acc;
    if (lane == 0) tops[warp] = own.top, sums[warp] = own.sum;
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
  // Of this warp's splits, COMBINE_AHEAD at once.
  DEVICE PartialSums of_splits(const CombineParams& p) const {
    PartialSums all;
#pragma unroll 1
    for (int s0 = threadIdx.x / 32; s0 < used; s0 += COMBINE_WARPS * COMBINE_AHEAD) {
      uint2 pairs[COMBINE_AHEAD];
      float4 v[COMBINE_AHEAD];
#pragma unroll
      for (int i = 0; i < COMBINE_AHEAD; ++i) {  // a split read twice counts once
        const i64 at = static_cast<i64>(min_int(s0 + i * COMBINE_WARPS, used - 1)) * p.heads;
        pairs[i] = load8(ml + at * 2);
        v[i] = load_float4(o + at * p.value_dim);
      }
      float next = all.top;
#pragma unroll
      for (int i = 0; i < COMBINE_AHEAD; ++i) next = fmaxf(next, float_of_bits(pairs[i].x));
      const float base = next == NEG_INF ? 0.0f : next;  // no slot within the window yet
      const float shrink = exp2_fast(all.top - base);
      all.top = next;
      all.sum *= shrink;
      all.acc = float4{all.acc.x * shrink, all.acc.y * shrink, all.acc.z * shrink, all.acc.w * shrink};
#pragma unroll
      for (int i = 0; i < COMBINE_AHEAD; ++i) {
        const float w = s0 + i * COMBINE_WARPS < used ? exp2_fast(float_of_bits(pairs[i].x) - base) : 0.0f;
        all.sum += w * float_of_bits(pairs[i].y);
        all.acc = float4{all.acc.x + w * v[i].x, all.acc.y + w * v[i].y, all.acc.z + w * v[i].z, all.acc.w + w * v[i].w};
      }
    }
    return all;
  }
  // Of this warp's groups, of which PARTS partial results each were left.
  template <int PARTS>
  DEVICE PartialSums of_groups(const CombineParams& p) const {
    constexpr int AT_ONCE = COMBINE_AHEAD / PARTS;  // groups whose loads are on their way together
    PartialSums all;
#pragma unroll 1
    for (int group = threadIdx.x / 32; group * SPLIT_GROUP < used; group += COMBINE_WARPS * AT_ONCE) {
      uint2 pairs[AT_ONCE][PARTS];
      float4 v[AT_ONCE][PARTS];
#pragma unroll
      for (int g = 0; g < AT_ONCE; ++g)
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {  // past the last one, the first again, which does not count
          const int split = (group + g * COMBINE_WARPS) * SPLIT_GROUP + i;
          const i64 at = split < used ? static_cast<i64>(split) * p.heads : 0;
          pairs[g][i] = load8(ml + at * 2);
          v[g][i] = load_float4(o + at * p.value_dim);
        }
#pragma unroll
      for (int g = 0; g < AT_ONCE; ++g) {
        PartialSums sums;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
          const bool counts = (group + g * COMBINE_WARPS) * SPLIT_GROUP + i < used;
          sums.take(counts ? float_of_bits(pairs[g][i].x) : NEG_INF, float_of_bits(pairs[g][i].y), v[g][i]);
        }
        all.take(sums.top, sums.sum, sums.acc);
      }
    }
    return all;
  }
};
