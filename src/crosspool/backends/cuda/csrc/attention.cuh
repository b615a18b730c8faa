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
  int key_dim, value_dim;
  float scale_log2;       // softmax scale * log2(e)
};

#define NEG_INF (-__builtin_huge_valf())

// How a token's slots are split: whole tiles, as even as tiles allow. A context of few tiles goes into `few_splits`, so that
// blocks have more than one and less is merged; the other splits are empty.
// NOTE: a matter of the token's length alone. So its attention has the same bits in every batch; the batch only decides how
// many neighbouring splits a block takes.
struct Splits {
  int first, tile, per_split, used, length;  // from slot `first` on, `per_split` tiles each; the first `used` hold slots

  // p: of the split pass, or of the merge.
  template <class Params>
  static DEVICE Splits of(const Params& p, int length, int tile) {
    const int first = p.window > 0 ? max_int(length - p.window, 0) / tile * tile : 0;
    const int tiles = ceil_div(length - first, tile);
    const int per_split = max_int(ceil_div(tiles, tiles > 2 * p.splits ? p.splits : p.few_splits), 1);
    return Splits{first, tile, per_split, ceil_div(tiles, per_split), length};
  }
  // The first split of block `block` of `blocks`, which is the end of the one before.
  DEVICE int share(int block, int blocks) const {
    return used <= blocks ? min_int(block, used) : static_cast<int>(static_cast<i64>(block) * used / blocks);
  }
  DEVICE int begin(int split) const { return min_int(first + split * per_split * tile, length); }
};
