// Decode attention as two kernels: blocks each take some splits of a token's slots, then the merge of the splits.
#include "attention_block.cuh"

struct WideAttentionParams {
  PanelMap map;
  AttentionParams attention;
};

template <class Block>
DEVICE void attend_split(const AttentionParams& p, const PanelMap* map = nullptr) {
  Block self = Block::at(p, blockIdx.x, gridDim.x, blockIdx.y, blockIdx.z);
  self.map = map;
  grid_launch_dependents();
  if (Block::IS_READY) grid_wait();  // the kernel before wrote cache rows
  const u64 upcoming = self.start();
  if (!Block::IS_READY) grid_wait();
  self.finish(upcoming);
}

// gqa_d<head_dim>_h<heads of a block>, mla_l<latent>_r<rope>_h<heads of a block>. ready: queries and slots are there;
// wide: compute capability 9.0.
#define ATTENTION(name, threads, min_blocks, ...)                                                         \
  KERNEL(name, AttentionParams, threads, min_blocks) { attend_split<Attention<__VA_ARGS__, false>>(p); } \
  KERNEL(name##_ready, AttentionParams, threads, min_blocks) { attend_split<Attention<__VA_ARGS__, true>>(p); }

ATTENTION(attention_gqa_d64_h8, 128, 2, 64, 64, true, 1, 64, 4, 4)
ATTENTION(attention_gqa_d128_h8, 128, 2, 128, 128, true, 1, 64, 3, 4)
ATTENTION(attention_gqa_d128_h16, 128, 2, 128, 128, true, 2, 64, 2, 4)
ATTENTION(attention_gqa_d256_h8, 128, 1, 256, 256, true, 1, 64, 3, 4)
ATTENTION(attention_mla_l512_r64_h16, 256, 1, 576, 512, false, 2, 64, 2, 8)
ATTENTION(attention_mla_l512_r64_h24, 256, 1, 576, 512, false, 3, 64, 2, 8)

// Products of warpgroups where splits have several tiles. Those of one tile take the other products, whose code is shorter:
// that counts where it runs once. A matter of the token's length alone, as splits are.
template <int NT>
DEVICE void attend_wide(const WideAttentionParams& p) {
  const AttentionParams& a = p.attention;
  if (Splits::of(a, a.lengths[blockIdx.z], 64).per_split == 1) attend_split<Attention<576, 512, false, NT, 64, 2, 8, false>>(a);
  else attend_split<Attention<576, 512, false, NT, 64, 2, 8, false, true>>(a, &p.map);
}
KERNEL(attention_mla_l512_r64_h16_wide, WideAttentionParams, 256, 1) { attend_wide<2>(p); }
KERNEL(attention_mla_l512_r64_h24_wide, WideAttentionParams, 256, 1) { attend_wide<3>(p); }

// Any shape, on plain arithmetic: one warp a (token, head, block). Slow; small models and checks use it.
DEVICE void attend_any(const AttentionParams& p, const Splits& splits, int split) {
  const i64 token = blockIdx.z;
  const int head = blockIdx.y, lane = threadIdx.x % 32;
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
  for (int split = blockIdx.x; split < p.splits; split += gridDim.x) attend_any(p, splits, split);
}

constexpr int COMBINE_THREADS = 256;
constexpr int COMBINE_GROUPS = COMBINE_THREADS / 32;
constexpr int COMBINE_VALUES = 128;                  // of one head, a block: a lane's four
constexpr int MAX_SPLITS = 512;
constexpr int AHEAD = 16;                            // splits a group reads at once

// Merge the splits, LANE_SPLITS * 32 at most, of one (token, head) for 128 values: eight groups of threads take every
// eighth split.
template <int LANE_SPLITS>
DEVICE void combine(const CombineParams& p) {
  float* sums = reinterpret_cast<float*>(dynamic_smem());  // COMBINE_GROUPS * COMBINE_VALUES
  float* weights = sums + COMBINE_GROUPS * COMBINE_VALUES;  // splits
  const i64 token = blockIdx.z;
  const int head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  grid_launch_dependents();
  grid_wait();
  const float sink = p.sinks != nullptr ? bf16_value(p.sinks[head]) * 1.4426950408889634f : NEG_INF;
  const float* ml = p.partial_ml + (token * p.splits * p.heads + head) * 2;
  float m[LANE_SPLITS], l[LANE_SPLITS], top = sink;
#pragma unroll
  for (int i = 0; i < LANE_SPLITS; ++i) {  // all loads before the first use
    const int split = lane + i * 32;
    m[i] = NEG_INF, l[i] = 0.0f;
    if (split < p.splits) {
      const uint2 pair = load8(ml + static_cast<i64>(split) * p.heads * 2);
      m[i] = float_of_bits(pair.x), l[i] = float_of_bits(pair.y);
    }
  }
#pragma unroll
  for (int i = 0; i < LANE_SPLITS; ++i) top = fmaxf(top, m[i]);
  top = warp_max(top);  // every warp for itself
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < LANE_SPLITS; ++i) {
    const float w = l[i] > 0.0f ? exp2_fast(m[i] - top) : 0.0f;  // 0: an empty split, which wrote no values
    sum += w * l[i];
    if (warp == 0 && lane + i * 32 < p.splits) weights[lane + i * 32] = w;
  }
  sum = warp_sum(sum);
  if (p.sinks != nullptr) sum += exp2_fast(sink - top);
  block_sync();
  const int d = blockIdx.x * COMBINE_VALUES + lane * 4;
  float4 acc = float4{0.0f, 0.0f, 0.0f, 0.0f};
  if (d < p.value_dim) {
    const float* o = p.partial_o + (token * p.splits * p.heads + head) * p.value_dim + d;
    for (int s0 = warp; s0 < p.splits; s0 += COMBINE_GROUPS * AHEAD) {
      float4 v[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int s = s0 + i * COMBINE_GROUPS;
        v[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
        if (s < p.splits && weights[s] != 0.0f) v[i] = load_float4(o + static_cast<i64>(s) * p.heads * p.value_dim);
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int s = s0 + i * COMBINE_GROUPS;
        const float w = s < p.splits ? weights[s] : 0.0f;
        acc.x += w * v[i].x;
        acc.y += w * v[i].y;
        acc.z += w * v[i].z;
        acc.w += w * v[i].w;
      }
    }
  }
  *reinterpret_cast<float4*>(sums + warp * COMBINE_VALUES + lane * 4) = acc;
  block_sync();
  for (int i = threadIdx.x; i < COMBINE_VALUES; i += COMBINE_THREADS) {
    const int at = blockIdx.x * COMBINE_VALUES + i;
    if (at >= p.value_dim) continue;
    float v = 0.0f;
#pragma unroll
    for (int w = 0; w < COMBINE_GROUPS; ++w) v += sums[w * COMBINE_VALUES + i];
    p.out[(token * p.heads + head) * p.value_dim + at] = bf16_bits(sum > 0.0f ? v / sum : 0.0f);
  }
}

KERNEL(attention_combine, CombineParams, COMBINE_THREADS, 1) { combine<5>(p); }
KERNEL(attention_combine_many, CombineParams, COMBINE_THREADS, 1) { combine<MAX_SPLITS / 32>(p); }
