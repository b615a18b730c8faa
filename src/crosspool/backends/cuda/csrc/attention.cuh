// Decode attention over a paged cache, split along the tokens; a second kernel merges the splits.
#pragma once
#include "cache.cuh"
#include "rope.cuh"

struct AttentionParams {
  GqaInput gqa;           // what the kernels of one shape make queries and the newest slot from
  MlaInput mla;
  const u16* q;           // (tokens, heads, key_dim) bf16, ready, as are all cache rows; or null: made here
  CacheView cache;
  const int* lengths;     // (tokens): slots to attend to, the token's own included
  const int* table_rows;  // (tokens): row of the frame table, or null for the token's own index
  float* partial_o;       // (tokens, splits, heads, value_dim) fp32, not divided by the sum
  float* partial_ml;      // (tokens, splits, heads, 2) fp32: maximum (log2 domain) and sum
  i64 key_head_bytes;     // from one KV head's key to the next, within a slot
  i64 value_offset_bytes; // from a slot's start to the first value
  i64 value_head_bytes;
  int heads, kv_heads, splits, window;  // splits: of a token's slots, at most; window 0: all slots; else the last `window`
  int few_splits;                       // of short contexts, at most `splits`
  int merge_blocks;                     // blocks that share a token's splits, where they merge groups of them; else 0
  int key_dim, value_dim;
  float scale_log2;       // softmax scale * log2(e)
};

#define NEG_INF (-__builtin_huge_valf())

constexpr int SPLIT_GROUP = 4;  // neighbouring splits of latents that are merged one after another, before groups are

// How a token's slots are split: whole tiles, as even as tiles allow. A context of few tiles goes into `few_splits`, so that
// blocks have more than one and less is merged; the other splits are empty.
// NOTE: a matter of the token's length alone. So its attention has the same bits in every batch; the batch only decides how
// many neighbouring splits a block takes, and whether it merges them itself.
struct Splits {
  int first, tile, per_split, used, length;  // from slot `first` on, `per_split` tiles each; the first `used` hold slots
  int limit;                                 // of `used`, whatever the length

  // p: of the split pass, or of the merge.
  template <class Params>
  static DEVICE Splits of(const Params& p, int length, int tile) {
    const int first = p.window > 0 ? max_int(length - p.window, 0) / tile * tile : 0;
    const int tiles = ceil_div(length - first, tile);
    const int per_split = max_int(ceil_div(tiles, tiles > 2 * p.splits ? p.splits : p.few_splits), 1);
    return Splits{first, tile, per_split, ceil_div(tiles, per_split), length, p.splits};
  }
  // Splits that a block merges itself: a whole group, where no block of `blocks` then has more than an eighth more splits.
  DEVICE int merged(int blocks) const {
    if (blocks == 0) return 1;
    const int of_block = min_int(SPLIT_GROUP * ceil_div(ceil_div(used, SPLIT_GROUP), blocks), used);
    return of_block * 8 <= ceil_div(used, blocks) * 9 ? SPLIT_GROUP : 1;
  }
  // The first split of block `block` of `blocks`, which is the end of the one before; blocks take whole `unit`s.
  DEVICE int share(int block, int blocks, int unit) const {
    if (blocks >= limit) return block;  // a split each, and those past the last one have no slots
    const int units = ceil_div(used, unit);
    const int first = units <= blocks ? block : static_cast<int>(static_cast<i64>(block) * units / blocks);
    return min_int(first * unit, used);
  }
  DEVICE int begin(int split) const { return min_int(first + split * per_split * tile, length); }
};

// How sums of a maximum `before` take in those of a maximum `other`, in whichever kernel: with the same bits.
struct Fold {
  float top, kept, taken;

  DEVICE Fold(float before, float other) {
    top = fmaxf(before, other);
    const float base = top == NEG_INF ? 0.0f : top;  // no slot within the window yet
    kept = exp2_fast(before - base), taken = exp2_fast(other - base);
  }
  static DEVICE float of(float sum, float kept, float part, float taken) {
    return multiply_add(sum, kept, multiply(part, taken));
  }
  DEVICE float of(float sum, float part) const { return of(sum, kept, part, taken); }
};
