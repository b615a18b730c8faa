// Decode attention as two kernels: blocks each take some splits of a token's slots, then the merge of the splits.
#include "attention_heads.cuh"
#include "attention_latents.cuh"
#include "combine_up.cuh"

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
  const auto upcoming = self.start();
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
  }                                                                                                               \
  KERNEL(name##_wide_merging, WideAttentionParams, 256, 1) {                                                      \
    attend_split<LatentsAttention<__VA_ARGS__, false, true, true>>(p.attention, p.has_map ? &p.map : nullptr);    \
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

// Blocks (ceil(value_dim / 128), heads, tokens).
template <SplitGroups GROUPS>
DEVICE void combine(const CombineParams& p) {
  const MergedSplits<GROUPS> merged(p, blockIdx.z, blockIdx.y, blockIdx.x * COMBINE_VALUES);
  const int at = blockIdx.x * COMBINE_VALUES + static_cast<int>(threadIdx.x);
  const float value = merged.value(p, dynamic_smem());
  if (threadIdx.x >= COMBINE_VALUES || at >= p.value_dim) return;
  p.out[(static_cast<i64>(blockIdx.z) * p.heads + blockIdx.y) * p.value_dim + at] = bf16_bits(value);
}

KERNEL(attention_combine, CombineParams, COMBINE_THREADS, 3) { combine<NO_GROUPS>(p); }
KERNEL(attention_combine_groups, CombineParams, COMBINE_THREADS, 3) { combine<GROUPS_ANYWHERE>(p); }

// The same, and each head's projection behind it: clusters (4 blocks of 128 latents; heads; tokens).
CLUSTER_KERNEL(attention_combine_up_128, CombineUpParams, COMBINE_THREADS, 1, UP_BLOCKS) { combine_up<1>(p); }
CLUSTER_KERNEL(attention_combine_up_256, CombineUpParams, COMBINE_THREADS, 2, UP_BLOCKS) { combine_up<2>(p); }
