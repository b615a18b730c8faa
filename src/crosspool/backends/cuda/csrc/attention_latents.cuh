// One block of decode attention over latents (MLA): one token, up to 8 * NT query heads, some neighbouring splits of its
// slots, each begun anew.
//
// Tiles of slots come through shared memory, STAGES - 1 ahead. Slots of earlier steps do not depend on the kernel before, so
// their loads start before the wait for it. Then each block norms and rotates its own queries; the block whose range holds
// the newest slot makes that slot from the projections, writes it to the cache and patches it into its tile.
#pragma once
#include "latents_queries.cuh"
#include "latents_scores.cuh"
#include "latents_sums.cuh"
#include "latents_tiles.cuh"

// Shapes as in LatentsRoom. READY: queries and all slots are there; else a block makes its own of the projections, by lanes.
// NOTE: most of this runs once a launch, and then its instructions come from memory: what is not needed costs time.
template <int KD, int VD, int NT, int TILE, int STAGES, int WARPS, bool READY, bool WIDE = false>
struct LatentsAttention {
  typedef LatentsRoom<KD, VD, NT, TILE, STAGES, WARPS, WIDE> Room;
  typedef LatentsNewest<Room> Newest;
  static constexpr bool IS_READY = READY, TAKES_MAP = true;

  const AttentionParams& p;
  SlotShare share;
  Room room;
  int head0, heads_here;
  u8* own_slot;         // where this block writes the token's own slot in the cache; null: it does not
  const PanelMap* map;  // as LatentsTiles has it

  // Block `part` of those that share splits of a token: the query heads in groups. block: of `blocks`.
  static DEVICE LatentsAttention at(const AttentionParams& p, int block, int blocks, int part, i64 token) {
    const int head0 = part * Room::COLS;
    const SlotShare share = SlotShare::of(p, block, blocks, token, TILE, !READY);
    return LatentsAttention{p, share, Room{dynamic_smem()}, head0, min_int(p.heads - head0, Room::COLS),
                            part == 0 ? share.own_slot(p) : nullptr, nullptr};
  }
  DEVICE bool is_idle() const { return share.is_idle(); }
  DEVICE LatentsTiles<Room> tiles() const {
    return LatentsTiles<Room>{p.cache, map, room, share.table_row, share.end, share.written()};
  }

  // Put the first tiles on their way; returns where the one behind them lies, for `finish`.
  DEVICE u64 start() const {
    const LatentsTiles<Room> tiles = this->tiles();
    u64 places[STAGES];  // asked for all at once
#pragma unroll
    for (int i = 0; i < STAGES; ++i) places[i] = i < share.tiles ? tiles.place_of(share.begin + i * TILE) : 0;
    tiles.prepare();
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
      if (i < share.tiles) tiles.start(share.begin + i * TILE, i, places[i]);
      copy_async_commit();
    }
    return places[STAGES - 1];
  }

  // All tiles of the block, once queries and newest slot can be made; every split's partial attention for the merge.
  DEVICE void finish(u64 upcoming) const {
    const LatentsTiles<Room> tiles = this->tiles();
    prepare_queries();
    if constexpr (READY) share.leave_empty(p, head0, heads_here);
    LatentsSums<Room> sums;
    sums.clear();
    int split = share.split, left = share.per_split;  // the present split's number, and tiles of it still to come

    LatentsScores<Room> scores;
    Room::publish();
    block_sync();  // the queries are there
    if (!WIDE && share.tiles > 0) scores.load_queries(room);
    for (int i = 0; i < share.tiles; ++i) {
      const int tile = share.begin + i * TILE, stage = i % STAGES;
      tiles.wait(tile, stage, i / STAGES);
      Room::publish();
      block_sync();  // the tile has arrived for all; the stage of tile i - 1 is free
      if (i + STAGES - 1 < share.tiles) tiles.start(tile + (STAGES - 1) * TILE, (i + STAGES - 1) % STAGES, upcoming);
      copy_async_commit();
      if (i + STAGES < share.tiles) upcoming = tiles.place_of(tile + STAGES * TILE);
      if (!READY && i == share.tiles - 1 && share.has_newest) {
        Newest::patch(room, stage, share.end - 1 - tile);
        Room::publish();
        block_sync();
      }
      scores.make(room, stage);
      block_sync();
      sums.softmax(room, share.end - tile, p.scale_log2);
      Room::publish();
      block_sync();
      sums.add_values(room, stage);
      if (--left > 0 && i < share.tiles - 1) continue;
      sums.write(p, share.part(p, split, head0), heads_here);
      if (i == share.tiles - 1) break;
      sums.clear();
      ++split, left = share.per_split;
    }
  }

 private:
  DEVICE void prepare_queries() const {
    const LatentsQueries<Room> queries{p, room, share.token, head0, heads_here};
    if constexpr (READY) {
      if (share.tiles > 0) queries.copy();
    } else {
      Newest newest{};
      if (share.has_newest) newest.load(p.mla, share.token);
      if (share.tiles > 0) queries.make();
      if (share.has_newest) newest.make(p.mla, share.token, room, own_slot);
    }
  }
};
