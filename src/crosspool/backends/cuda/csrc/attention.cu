// Decode attention as two kernels: blocks each take some splits of a token's slots, then the merge of the splits.
#include "attention_heads.cuh"
#include "attention_latents.cuh"

struct WideAttentionParams {
  PanelMap map;
  AttentionParams attention;
  int has_map;  // a tile lies within a page
};

// Blocks (groups of heads, shares of the splits, tokens): those of short contexts that have slots come first, and spread.
template <class Block>
DEVICE void attend_split(const AttentionParams& p, const PanelMap* map = nullptr) {
  if (map != nullptr && threadIdx.x == 0) expect_map(*map);
  Block self = Block::at(p, blockIdx.y, gridDim.y, blockIdx.x, blockIdx.z);
  if (self.is_idle()) return;
  if constexpr (Block::TAKES_MAP) self.map = map;
  grid_launch_dependents();
  if (Block::IS_READY) grid_wait();  // the kernel before wrote cache rows
  const u64 upcoming = self.start();
  if (!Block::IS_READY) grid_wait();
  self.finish(upcoming);
}

// gqa_d<head_dim>_h<heads of a block>, mla_l<latent>_r<rope>_h<heads of a block>. ready: queries and slots are there;
// wide: compute capability 9.0.
#define ATTENTION(name, kind, threads, min_blocks, ...)                                              \
  KERNEL(name, AttentionParams, threads, min_blocks) { attend_split<kind<__VA_ARGS__, false>>(p); } \
  KERNEL(name##_ready, AttentionParams, threads, min_blocks) { attend_split<kind<__VA_ARGS__, true>>(p); }

ATTENTION(attention_gqa_d64_h8, HeadsAttention, 128, 4, 64, 1, 3)
ATTENTION(attention_gqa_d128_h8, HeadsAttention, 128, 4, 128, 1, 2)
ATTENTION(attention_gqa_d128_h16, HeadsAttention, 128, 2, 128, 2, 2)
ATTENTION(attention_gqa_d256_h8, HeadsAttention, 128, 1, 256, 1, 2)
ATTENTION(attention_mla_l512_r64_h16, LatentsAttention, 256, 1, 576, 512, 2, 64, 2, 8)
ATTENTION(attention_mla_l512_r64_h24, LatentsAttention, 256, 1, 576, 512, 3, 64, 2, 8)

#define WIDE_ATTENTION(name, ...)                                                                                    \
  KERNEL(name##_wide, WideAttentionParams, 256, 2) {                                                              \
    attend_split<LatentsAttention<__VA_ARGS__, false, true>>(p.attention, p.has_map ? &p.map : nullptr);          \
  }
WIDE_ATTENTION(attention_mla_l512_r64_h16, 576, 512, 2, 64, 2, 8)
WIDE_ATTENTION(attention_mla_l512_r64_h24, 576, 512, 3, 64, 2, 8)

// Any shape, on plain arithmetic: one warp a (token, head, block). Slow; small models and checks use it.
DEVICE void attend_any(const AttentionParams& p, const Splits& splits, int split) {
  const i64 token = blockIdx.z;
  const int head = blockIdx.x, lane = threadIdx.x % 32;
  const int kv_head = head / (p.heads / p.kv_heads), length = p.lengths[token];
  const i64 row = p.table_rows != nullptr ? p.table_rows[token] : token;
  const int window_begin = p.window > 0 ? max_int(length - p.window, 0) : 0, end = splits.begin(split + 1);
  const u16* q = p.q + (token * p.heads + head) * p.key_dim;
  const i64 part = (token * p.splits + split) * p.heads + head;
  float* o = reinterpret_cast<float*>(dynamic_smem());  // value_dim
  for (int d = lane; d < p.value_dim; d += 32) o[d] = 0.0f;
  float m = NEG_INF, l = 0.0f;
  for (int slot = max_int(splits.begin(split), window_begin); slot < end; ++slot) {
    const u8* at = slot_address(p.cache, row, slot);
    const u16* key = reinterpret_cast<const u16*>(at + kv_head * p.key_head_bytes);
    const u16* value = reinterpret_cast<const u16*>(at + p.value_offset_bytes + kv_head * p.value_head_bytes);
    float dot = 0.0f;
    for (int d = lane; d < p.key_dim; d += 32) dot += bf16_value(q[d]) * bf16_value(key[d]);
    const float score = warp_sum(dot) * p.scale_log2, next = fmaxf(m, score);
    const float shrink = exp2_fast(m - next), e = exp2_fast(score - next);
    for (int d = lane; d < p.value_dim; d += 32) o[d] = o[d] * shrink + e * bf16_value(value[d]);
    l = l * shrink + e;
    m = next;
  }
  for (int d = lane; d < p.value_dim; d += 32) p.partial_o[part * p.value_dim + d] = o[d];
  if (lane == 0) p.partial_ml[part * 2] = m, p.partial_ml[part * 2 + 1] = l;
}

KERNEL(attention_any, AttentionParams, 32, 1) {
  grid_launch_dependents();
  grid_wait();
  const Splits splits = Splits::of(p, p.lengths[blockIdx.z], 32);
  for (int split = blockIdx.y; split < p.splits; split += gridDim.y) attend_any(p, splits, split);
}

constexpr int COMBINE_THREADS = 256;
constexpr int COMBINE_WARPS = COMBINE_THREADS / 32;
constexpr int COMBINE_VALUES = 128;  // of one head, a block: a lane's four
constexpr int AHEAD = 8;             // splits a warp reads at once

// Merge the splits of one (token, head) for 128 values: a warp takes every eighth split, with its own maximum and sum, then
// the warps' are merged. Which splits have slots is known before the wait, so one round of loads brings up to 64.
KERNEL(attention_combine, CombineParams, COMBINE_THREADS, 3) {
  float* values = reinterpret_cast<float*>(dynamic_smem());       // (COMBINE_WARPS, COMBINE_VALUES)
  float* tops = values + COMBINE_WARPS * COMBINE_VALUES;          // (COMBINE_WARPS)
  float* sums = tops + COMBINE_WARPS;                             // (COMBINE_WARPS)
  const i64 token = blockIdx.z;
  const int head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int d = blockIdx.x * COMBINE_VALUES + lane * 4;
  grid_launch_dependents();
  const int used = Splits::of(p, p.lengths[token], p.tile).used;
  const float sink = p.sinks != nullptr ? bf16_value(p.sinks[head]) * 1.4426950408889634f : NEG_INF;
  const i64 first = token * p.splits * p.heads + head;
  const float* o = p.partial_o + first * p.value_dim + min_int(d, p.value_dim - 4);
  const float* ml = p.partial_ml + first * 2;
  grid_wait();
  float top = NEG_INF, sum = 0.0f;
  float4 acc = float4{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
  for (int s0 = warp; s0 < used; s0 += COMBINE_WARPS * AHEAD) {
    uint2 pairs[AHEAD];
    float4 v[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {  // a split read twice counts once
      const i64 at = static_cast<i64>(min_int(s0 + i * COMBINE_WARPS, used - 1)) * p.heads;
      pairs[i] = load8(ml + at * 2);
      v[i] = load_float4(o + at * p.value_dim);
    }
    float next = top;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) next = fmaxf(next, float_of_bits(pairs[i].x));
    const float base = next == NEG_INF ? 0.0f : next;  // no slot within the window yet
    const float shrink = exp2_fast(top - base);
    top = next;
    sum *= shrink;
    acc = float4{acc.x * shrink, acc.y * shrink, acc.z * shrink, acc.w * shrink};
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const float w = s0 + i * COMBINE_WARPS < used ? exp2_fast(float_of_bits(pairs[i].x) - base) : 0.0f;
      sum += w * float_of_bits(pairs[i].y);
      acc = float4{acc.x + w * v[i].x, acc.y + w * v[i].y, acc.z + w * v[i].z, acc.w + w * v[i].w};
    }
  }
  *reinterpret_cast<float4*>(values + warp * COMBINE_VALUES + lane * 4) = acc;
  if (lane == 0) tops[warp] = top, sums[warp] = sum;
  block_sync();
  const int at = blockIdx.x * COMBINE_VALUES + static_cast<int>(threadIdx.x);
  if (threadIdx.x >= COMBINE_VALUES || at >= p.value_dim) return;
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
  p.out[(token * p.heads + head) * p.value_dim + at] = bf16_bits(total > 0.0f ? value / total : 0.0f);
}
