// One block of decode attention over latents (MLA): one token, up to 8 * NT query heads, some neighbouring splits of its
// slots, each begun anew.
//
// Tiles of slots come through shared memory, STAGES of them at a time. Slots of earlier steps do not depend on the kernel
// before, so their loads start before the wait for it. Then each block norms and rotates its own queries; the block whose
// range holds the newest slot makes that slot from the projections, writes it to the cache and puts it into its tile.
#pragma once
#include "latents_queries.cuh"
#include "latents_scores.cuh"
#include "latents_sums.cuh"
#include "latents_tiles.cuh"

// Shapes as in LatentsRoom. READY: queries and all slots are there; else a block makes its own of the projections, by lanes.
// MERGES: a block that has all splits of a group leaves one partial attention of them.
// NOTE: most of this runs once a launch, and then its instructions come from memory: what is not needed costs time.
template <int KD, int VD, int NT, int TILE, int STAGES, int WARPS, bool READY, bool WIDE = false, bool MERGES = false>
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
    const SlotShare share = SlotShare::of<MERGES>(p, block, blocks, token, TILE, !READY);
    return LatentsAttention{p, share, Room{dynamic_smem()}, head0, min_int(p.heads - head0, Room::COLS),
                            part == 0 ? share.own_slot(p) : nullptr, nullptr};
  }
  DEVICE bool is_idle() const { return share.is_idle(); }
  DEVICE LatentsTiles<Room> tiles() const {
    return LatentsTiles<Room>{p.cache, map, room, share.table_row, share.end, share.written()};
  }

  // Put the first tiles on their way; returns the frame of the one behind them, for `finish`.
  DEVICE int start() const {
    const LatentsTiles<Room> tiles = this->tiles();
    int frames[STAGES];  // asked for all at once
#pragma unroll
    for (int i = 0; i < STAGES; ++i) frames[i] = i < share.tiles ? tiles.frame_of_tile(share.begin + i * TILE) : 0;
    tiles.prepare();
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {  // one less: queries would have to wait for the last one
      if (i < share.tiles) tiles.start(share.begin + i * TILE, i, frames[i]);
      copy_async_commit();
    }
    return frames[STAGES - 1];
  }

  // All tiles of the block, once queries and newest slot can be made; every split's partial attention for the merge.
  DEVICE void finish(int upcoming) const {
    const LatentsTiles<Room> tiles = this->tiles();
    const auto start_last = [&] {  // the tile of the last stage
      if (STAGES - 1 < share.tiles) tiles.start(share.begin + (STAGES - 1) * TILE, STAGES - 1, upcoming);
      copy_async_commit();
      if (STAGES < share.tiles) upcoming = tiles.frame_of_tile(share.begin + STAGES * TILE);
    };
    prepare_queries([&] {
      if (!MERGES) start_last();  // in a batch, whose blocks all ask at once, it would be in the way
    });
    if constexpr (READY) share.leave_empty(p, head0, heads_here);
    LatentsSums<Room> sums;
    sums.clear();
    LatentsSums<Room> group;  // of MERGES
    group.clear();
    int split = share.split, left = share.per_split;  // the present split's number, and tiles of it still to come

    LatentsScores<Room> scores;
    Room::publish();
    block_sync();  // the queries are there
    if (MERGES) start_last();
    if (!WIDE && share.tiles > 0) scores.load_queries(room);
#pragma unroll 1
    for (int i = 0; i < share.tiles; ++i) {
      const int tile = share.begin + i * TILE, stage = i % STAGES;
      tiles.wait(tile, stage, i / STAGES);
      scores.make(room, stage);
      block_sync();
      sums.softmax(room, share.end - tile, p.scale_log2);
      Room::publish();
      block_sync();
      sums.add_values(room, stage);
      if (i + STAGES < share.tiles) {
        block_sync();  // the stage is free
        tiles.start(tile + STAGES * TILE, stage, upcoming);
        if (i + STAGES + 1 < share.tiles) upcoming = tiles.frame_of_tile(tile + (STAGES + 1) * TILE);
      }
      copy_async_commit();
      if (--left > 0 && i < share.tiles - 1) continue;
      if (MERGES && share.merged > 1) {
        const int within = split % share.merged;
        group.fold(room, sums);
        if (within == share.merged - 1 || i == share.tiles - 1) {
          group.template write<true>(p, share.part(p, split - within, head0), heads_here);
          group.clear();
        }
      } else {
        sums.write(p, share.part(p, split, head0), heads_here);
      }
      if (i == share.tiles - 1) break;
      sums.clear();
      ++split, left = share.per_split;
    }
  }

 private:
  // behind_loads: called once what queries are made of is on its way.
  template <class BehindLoads>
  DEVICE void prepare_queries(const BehindLoads& behind_loads) const {
    const LatentsQueries<Room> queries{p, room, share.token, head0, heads_here};
    if constexpr (READY) {
      if (share.tiles > 0) queries.copy();
      behind_loads();
    } else {
      Newest newest{};
      if (share.has_newest) newest.load(p.mla, share.token);
      if (share.tiles > 0) queries.make(behind_loads);
      if (share.has_newest) newest.make(p.mla, share.token, room, own_slot);
    }
  }
};
