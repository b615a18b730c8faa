// What one block of decode attention takes of a token's slots: some neighbouring splits, each begun anew.
#pragma once
#include "attention.cuh"

struct SlotShare {
  i64 token, table_row;
  int begin, end, tiles;       // its slots, and the tiles that hold them
  int split, per_split, used;  // the first of its splits, tiles of each, and how many of all splits hold slots
  int merged;                  // splits it merges before it leaves them
  bool has_newest;             // its last slot is the token's own, which this kernel makes

  // block: of `blocks`. tile: slots. makes_newest: the token's own slot is not in the cache yet. MERGES: groups of splits.
  template <bool MERGES = false>
  static DEVICE SlotShare of(const AttentionParams& p, int block, int blocks, i64 token, int tile, bool makes_newest) {
    const int length = p.lengths[token];
    const Splits splits = Splits::of(p, length, tile);
    const int merged = MERGES ? splits.merged(blocks) : 1;
    const int split = splits.share(block, blocks, merged), begin = splits.begin(split);
    const int end = splits.begin(splits.share(block + 1, blocks, merged)), tiles = ceil_div(end - begin, tile);
    const bool has_newest = makes_newest && tiles > 0 && end == length;
    const i64 table_row = p.table_rows != nullptr ? p.table_rows[token] : token;
    return SlotShare{token, table_row, begin, end, tiles, split, splits.per_split, splits.used, merged, has_newest};
  }
  // Where the token's own slot lies; null where another block has it.
  DEVICE u8* own_slot(const AttentionParams& p) const {
    return has_newest ? slot_address(p.cache, table_row, end - 1) : nullptr;
  }
  // The end of what was written before this kernel.
  DEVICE int written() const { return has_newest ? end - 1 : end; }
  // A block without slots, of which the first stays: it waits for the kernel before, so that this one ends behind it.
  DEVICE bool is_idle() const { return tiles == 0 && blockIdx.y > 0; }
  // Where the partial results of split `number` begin, from head `head0` on, in heads.
  DEVICE i64 part(const AttentionParams& p, int number, int head0) const {
    return (token * p.splits + number) * p.heads + head0;
  }
  // Splits without slots: blocks that stay tell of them, to those who merge without knowing which splits hold slots.
  DEVICE void leave_empty(const AttentionParams& p, int head0, int heads_here) const {
    const int step = max_int(min_int(used, gridDim.y), 1);
    for (int empty = used + blockIdx.y; empty < p.splits; empty += step) {
      if (static_cast<int>(threadIdx.x) >= heads_here) continue;
      float* ml = p.partial_ml + (part(p, empty, head0) + threadIdx.x) * 2;
      ml[0] = NEG_INF, ml[1] = 0.0f;
    }
  }
};
