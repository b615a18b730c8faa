// One block of decode attention over keys and values: one token, up to 8 * NT query heads of one KV head, some neighbouring
// splits of its slots, each begun anew.
//
// Every warp has a quarter of each tile's slots for itself, from the copy to its own softmax: tiles need no barrier, and
// warps meet when queries are made, and to merge a split. Probabilities are transposed once more in registers, and are then
// the operand that values take. Tiles come through shared memory, STAGES of them at a time. Slots of earlier steps do not depend
// on the kernel before, so their loads start before the wait for it. Then the block norms and rotates its queries; the warp
// whose slots hold the newest makes that one from the projections, writes it to the cache and puts it into its tile.
#pragma once
#include "heads_queries.cuh"
#include "heads_scores.cuh"
#include "heads_sums.cuh"
#include "heads_tiles.cuh"

// READY: queries and all slots are there; else the block makes its own of the projections, by lanes.
// NOTE: most of this runs once a launch, and then its instructions come from memory: what is not needed costs time.
template <int D, int NT, int STAGES, bool READY>
struct HeadsAttention {
  typedef HeadsRoom<D, NT, STAGES> Room;
  typedef HeadsNewest<Room> Newest;
  static constexpr int TILE = Room::TILE;
  static constexpr bool IS_READY = READY, TAKES_MAP = false;

  const AttentionParams& p;
  SlotShare share;
  Room room;
  int kv_head, head0, heads_here, window_begin;
  bool is_writer;  // of the token's own slot to the cache, where it is this block's
  u8* own_slot;    // ... here

  // Block `part` of those that share splits of a token: each KV head's query heads in groups. block: of `blocks`.
  static DEVICE HeadsAttention at(const AttentionParams& p, int block, int blocks, int part, i64 token) {
    const int group = p.heads / p.kv_heads, groups_per_kv = ceil_div(group, Room::COLS);
    const int kv_head = part / groups_per_kv, head0 = kv_head * group + part % groups_per_kv * Room::COLS;
    const SlotShare share = SlotShare::of(p, block, blocks, token, TILE, !READY);
    return HeadsAttention{p, share, Room{dynamic_smem()}, kv_head, head0, min_int((kv_head + 1) * group - head0, Room::COLS),
                          p.window > 0 ? max_int(p.lengths[token] - p.window, 0) : 0, part % groups_per_kv == 0,
                          share.own_slot(p)};
  }
  DEVICE bool is_idle() const { return share.is_idle(); }
  DEVICE i64 key_offset() const { return kv_head * p.key_head_bytes; }
  DEVICE i64 value_offset() const { return p.value_offset_bytes + kv_head * p.value_head_bytes; }
  DEVICE HeadsTiles<Room> tiles() const {
    return HeadsTiles<Room>{p.cache, room, share.table_row, key_offset(), value_offset(), share.end, share.written()};
  }

  // Put the first tiles on their way; returns where the one behind them lies, for `finish`.
  DEVICE u64 start() const {
    const HeadsTiles<Room> tiles = this->tiles();
    u64 places[STAGES + 1];  // asked for all at once
#pragma unroll
    for (int i = 0; i <= STAGES; ++i) places[i] = i < share.tiles ? tiles.place_of(share.begin + i * TILE) : 0;
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) {
      if (i < share.tiles) tiles.start(share.begin + i * TILE, i, places[0]);
      copy_async_commit();
#pragma unroll
      for (int j = 0; j < STAGES; ++j) places[j] = places[j + 1];
    }
    return places[0];
  }

  // All tiles of the block, once queries and newest slot can be made; every split's partial attention for the merge.
  DEVICE void finish(u64 upcoming) const {
    const HeadsTiles<Room> tiles = this->tiles();
    Newest newest{};
    if (!READY && makes_newest()) newest.load(p, share.token, kv_head);
    if (share.tiles > 0) prepare_queries();
    if constexpr (READY) share.leave_empty(p, head0, heads_here);
    HeadsSums<Room> sums;
    sums.clear();
    int split = share.split, left = share.per_split;  // the present split's number, and tiles of it still to come
    block_sync();  // the queries are there
    HeadsScores<Room> scores;
    if (share.tiles > 0) scores.load_queries(room);
#pragma unroll 1
    for (int i = 0; i < share.tiles; ++i) {
      const int tile = share.begin + i * TILE, stage = i % STAGES;
      copy_async_wait<STAGES - 1>();
      warp_sync();  // this warp's slots have arrived
      if (!READY && i == share.tiles - 1 && makes_newest()) {
        newest.put(p.gqa, share.token, room, stage, share.end - 1 - tile, is_writer ? own_slot + key_offset() : nullptr,
                   own_slot + value_offset());
        warp_sync();
      }
      float s[NT][4];
      u32 pairs[NT][2];
      scores.make(room, stage, s);
      sums.softmax(s, pairs, window_begin - tile, share.end - tile, p.scale_log2);
      sums.add_values(room, stage, pairs);
      if (--left == 0 || i == share.tiles - 1) {
        sums.write(p, share.part(p, split, head0), heads_here, room, stage);
        if (i == share.tiles - 1) break;
        sums.clear();
        ++split, left = share.per_split;
        block_sync();
      }
      warp_sync();  // the stage is free for the next copies
      if (i + STAGES < share.tiles) tiles.start(tile + STAGES * TILE, stage, upcoming);
      copy_async_commit();
      if (i + STAGES + 1 < share.tiles) upcoming = tiles.place_of(tile + (STAGES + 1) * TILE);
    }
  }

 private:
  DEVICE void prepare_queries() const {
    const HeadsQueries<Room> queries{room, share.token, head0, heads_here};
    if constexpr (READY) queries.copy(p.q, p.heads);
    else queries.make(p.gqa);
  }
  // Whether this warp's slots hold the token's own.
  DEVICE bool makes_newest() const {
    return share.has_newest && (share.end - 1 - share.begin) % TILE / Room::OWN == static_cast<int>(threadIdx.x) / 32;
  }
};
