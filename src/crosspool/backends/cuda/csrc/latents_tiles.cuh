// Tiles of latents on their way to shared memory: whole ones by the copy engine where there are panels, else by all threads.
#pragma once
#include "latents_room.cuh"
#include "slot_share.cuh"

template <class Room>
struct LatentsTiles {
  static constexpr int TILE = Room::TILE, STAGES = Room::STAGES, PER_WARP = TILE / Room::WARPS;

  const CacheView& cache;
  const PanelMap* map;  // WIDE: whole tiles come by the copy engine; null: by all threads
  Room room;
  i64 table_row;
  int end, written;     // of the block's slots, and of those that were written before this kernel

  // Before the first tile.
  DEVICE void prepare() const {
    if (!Room::WIDE || map == nullptr) return;
    if (threadIdx.x == 0)
      for (int i = 0; i < STAGES; ++i) room.arrival(i).create();
    warp_sync();  // for the threads beside it that bring slots
  }
  // What `start` needs of the frame table: on its way a tile early. The frame of those eight, or `slot_of` of each thread.
  DEVICE u64 place_of(int tile) const {
    if (!is_whole(tile)) return slot_of(tile);
    return cache.frame_table[table_row * cache.table_row_stride +
                             static_cast<i64>(first_of_eight(tile) / cache.page_tokens) * cache.table_page_stride];
  }
  // Start loading the tile of slots that begins at `tile`; `place`: its `place_of`.
  DEVICE void start(int tile, int stage, u64 place) const {
    if (!is_whole(tile)) return load(tile, stage, place);
    if (threadIdx.x >= TILE / 8) return;
    if (threadIdx.x == 0) room.arrival(stage).expect(Room::STAGE);
    copy_panels(*map, room.stage(stage) + threadIdx.x * Room::GROUP, first_of_eight(tile) % cache.page_tokens,
                static_cast<int>(place), room.arrival(stage));
  }
  // Until what this thread may wait for has arrived: `turn` tiles came to this stage before.
  DEVICE void wait(int tile, int stage, u32 turn) const {
    if (is_whole(tile)) room.arrival(stage).wait(turn);
    else copy_async_wait<STAGES - 2>();
  }

 private:
  // Tiles of which every slot was written before this launch; behind them comes one more at most.
  DEVICE bool is_whole(int tile) const { return Room::WIDE && map != nullptr && tile + TILE <= written; }
  // The first of the eight slots of a tile that this thread brings, if it is one of the first TILE / 8.
  static DEVICE int first_of_eight(int tile) { return tile + static_cast<int>(threadIdx.x) % (TILE / 8) * 8; }
  // Where one of a warp's slots of a tile lies: a lane computes one.
  DEVICE u64 slot_of(int tile) const {
    const int of_warp = static_cast<int>(threadIdx.x) / 32 * PER_WARP + static_cast<int>(threadIdx.x) % 32 % PER_WARP;
    return reinterpret_cast<u64>(slot_address(cache, table_row, min_int(tile + of_warp, end - 1)));
  }
  // By all threads; `mine`: this one's `slot_of`.
  DEVICE void load(int tile, int stage, u64 mine) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 4
    for (int r = 0; r < PER_WARP; ++r) {
      const u8* slot = reinterpret_cast<const u8*>(shfl(mine, r));
      const int at = warp * PER_WARP + r;
      const bool valid = tile + at < written;
      for (int c = lane; c < Room::KD / 8; c += 32) copy_async16(room.slot_piece(stage, at, c), slot + c * 16, valid);
    }
  }
};
