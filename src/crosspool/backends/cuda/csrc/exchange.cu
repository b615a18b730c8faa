// Attention over pages that lie on several KV ranks: the home's queries and new cache rows to the shares, partial
// attention back, and the merge of all parts by their log-sum-exp. Flags and epochs are those of `crossing.cuh`.
#include "attention.cuh"
#include "crossing.cuh"

constexpr int EXCHANGE_THREADS = 256;
constexpr int MERGE_VALUES = 128;  // of one head, a block: a lane's four
constexpr int MERGE_GROUPS = EXCHANGE_THREADS / 32;

// This block's part of a copy, in pieces of 16 bytes where all of its sizes allow.
DEVICE void copy_part(u8* to, const u8* from, int bytes, int part, int parts, bool wide) {
  const int first = part * EXCHANGE_THREADS + threadIdx.x, step = parts * EXCHANGE_THREADS;
  if (wide)
    for (int i = first; i < bytes / 16; i += step) store16(to + i * 16, load16(from + i * 16));
  else
    for (int i = first; i < bytes / 2; i += step) reinterpret_cast<u16*>(to)[i] = reinterpret_cast<const u16*>(from)[i];
}

struct ExchangePutParams {
  LaneView view;
  Flags flags;           // in the shares' memory; count 0: no share has a page of these rows
  u8* slots[MAX_PEERS];  // the shares' slots: queries of all tokens, then the cache rows of all tokens
  const u8* q;           // (tokens, q_bytes)
  const u8* rows;        // (tokens, row_bytes): the tokens' cache rows
  CacheView cache;       // this rank's pages
  const int* own_slots;  // (tokens): where a token's row goes among them; below 0: its page lies elsewhere
  int tokens, q_bytes, row_bytes, layer;
};

// Blocks (parts, tokens).
KERNEL(exchange_put, ExchangePutParams, EXCHANGE_THREADS, 1) {
  const bool wide = (p.q_bytes | p.row_bytes) % 16 == 0;
  const i64 token = blockIdx.y;
  grid_launch_dependents();
  grid_wait();
  const u8* row = p.rows + token * p.row_bytes;
  for (int peer = 0; peer < p.flags.count; ++peer) {
    copy_part(p.slots[peer] + token * p.q_bytes, p.q + token * p.q_bytes, p.q_bytes, blockIdx.x, gridDim.x, wide);
    u8* rows = p.slots[peer] + static_cast<i64>(p.tokens) * p.q_bytes;
    if (blockIdx.x == 0) copy_part(rows + token * p.row_bytes, row, p.row_bytes, 0, 1, wide);
  }
  if (blockIdx.x == 0 && p.own_slots[token] >= 0)
    copy_part(slot_address(p.cache, token, p.own_slots[token]), row, p.row_bytes, 0, 1, wide);
  raise(p.view, p.flags, load_relaxed(p.view.lane + BASE), p.layer, gridDim.x * gridDim.y);
}

struct ExchangeTakeParams {
  LaneView view;
  Flags flags;           // in this rank's memory
  const u8* rows;        // (tokens, row_bytes), in its slot
  CacheView cache;
  const int* own_slots;  // (tokens), or below 0
  int row_bytes, layer;
};

// A share's first kernel of a layer: once queries and rows are here, the rows that belong here go to the cache. One block
// a token.
KERNEL(exchange_take, ExchangeTakeParams, EXCHANGE_THREADS, 1) {
  if (p.view.early) grid_launch_dependents();
  grid_wait();
  await(p.view, p.flags, load_relaxed(p.view.lane + BASE), p.layer);
  block_sync();
  if (!p.view.early) grid_launch_dependents();
  const i64 token = blockIdx.x;
  if (p.own_slots[token] >= 0)
    copy_part(slot_address(p.cache, token, p.own_slots[token]), p.rows + token * p.row_bytes, p.row_bytes, 0, 1,
              p.row_bytes % 16 == 0);
}

struct MergeParams {
  LaneView view;
  Flags wait_for;                 // in this rank's memory; count 0: no part comes from elsewhere
  Flags raise_for;                // in a peer's memory, behind `part`; count 0: none
  const float* parts[MAX_PEERS];  // of other ranks: (tokens, heads, value_dim) divided by the sum, (tokens, heads) log2-sum-exp
  const float* partial_o;         // this rank's splits, as attention leaves them
  const float* partial_ml;
  const u16* sinks;               // (heads) bf16 or null: a logit that joins the sum alone
  u16* out;                       // (tokens, heads, value_dim) bf16; or null:
  float* part;                    // as `parts`
  int num_parts, tokens, heads, splits, value_dim, layer;
};

// Blocks (ceil(value_dim / 128), heads, tokens). Shared memory: MERGE_GROUPS * MERGE_VALUES + splits + parts floats.
KERNEL(exchange_merge, MergeParams, EXCHANGE_THREADS, 1) {
  float* sums = reinterpret_cast<float*>(dynamic_smem());
  float* weights = sums + MERGE_GROUPS * MERGE_VALUES;
  const i64 token = blockIdx.z;
  const int head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool waits = p.wait_for.count > 0;
  if (!waits || p.view.early) grid_launch_dependents();
  grid_wait();
  const u64 base = load_relaxed(p.view.lane + BASE);
  if (waits) {
    await(p.view, p.wait_for, base, p.layer);
    block_sync();
    if (!p.view.early) grid_launch_dependents();
  }
  const i64 rows = static_cast<i64>(p.tokens) * p.heads, row = token * p.heads + head;
  const float* ml = p.partial_ml + (token * p.splits * p.heads + head) * 2;
  const float sink = p.sinks != nullptr ? bf16_value(p.sinks[head]) * 1.4426950408889634f : NEG_INF;
  float top = sink;
  for (int i = lane; i < p.splits + p.num_parts; i += 32) {  // every warp for itself
    if (i >= p.splits) top = fmaxf(top, p.parts[i - p.splits][rows * p.value_dim + row]);
    else if (ml[static_cast<i64>(i) * p.heads * 2 + 1] > 0.0f) top = fmaxf(top, ml[static_cast<i64>(i) * p.heads * 2]);
  }
  top = warp_max(top);
  float sum = 0.0f;
  for (int i = lane; i < p.splits + p.num_parts; i += 32) {
    float m = NEG_INF, l = 1.0f;
    if (i >= p.splits) m = p.parts[i - p.splits][rows * p.value_dim + row];
    else if (ml[static_cast<i64>(i) * p.heads * 2 + 1] > 0.0f)
      m = ml[static_cast<i64>(i) * p.heads * 2], l = ml[static_cast<i64>(i) * p.heads * 2 + 1];
    const float w = m == NEG_INF ? 0.0f : exp2_fast(m - top);  // 0: nothing there, and no values were written
    sum += w * l;
    if (warp == 0) weights[i] = w;
  }
  sum = warp_sum(sum);
  if (p.sinks != nullptr) sum += exp2_fast(sink - top);
  block_sync();
  const int d = blockIdx.x * MERGE_VALUES + lane * 4;
  float4 acc = float4{0.0f, 0.0f, 0.0f, 0.0f};
  if (d < p.value_dim)
    for (int i = warp; i < p.splits + p.num_parts; i += MERGE_GROUPS) {
      const float w = weights[i];
      if (w == 0.0f) continue;
      const float* o = i < p.splits ? p.partial_o + ((token * p.splits + i) * p.heads + head) * p.value_dim
                                    : p.parts[i - p.splits] + row * p.value_dim;
      const float4 v = load_float4(o + d);
      acc.x += w * v.x;
      acc.y += w * v.y;
      acc.z += w * v.z;
      acc.w += w * v.w;
    }
  *reinterpret_cast<float4*>(sums + warp * MERGE_VALUES + lane * 4) = acc;
  block_sync();
  for (int i = threadIdx.x; i < MERGE_VALUES; i += EXCHANGE_THREADS) {
    const int at = blockIdx.x * MERGE_VALUES + i;
    if (at >= p.value_dim) continue;
    float v = 0.0f;
#pragma unroll
    for (int w = 0; w < MERGE_GROUPS; ++w) v += sums[w * MERGE_VALUES + i];
    v = sum > 0.0f ? v / sum : 0.0f;
    if (p.out != nullptr) p.out[row * p.value_dim + at] = bf16_bits(v);
    else p.part[row * p.value_dim + at] = v;
  }
  if (p.part != nullptr && blockIdx.x == 0 && threadIdx.x == 0)
    p.part[rows * p.value_dim + row] = sum > 0.0f ? top + log2_full(sum) : NEG_INF;
  if (p.raise_for.count > 0) raise(p.view, p.raise_for, base, p.layer, gridDim.x * gridDim.y * gridDim.z);
}
