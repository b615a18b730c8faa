// Tiles of latents on their way to shared memory: slots of whole warps by the copy engine where there are panels, else by lanes.
#pragma once
#include "latents_room.cuh"
#include "slot_share.cuh"

template <class Room>
struct LatentsTiles {
  static constexpr int TILE = Room::TILE, STAGES = Room::STAGES, WARPS = Room::WARPS, PER_WARP = TILE / WARPS;
  static_assert(!Room::WIDE || PER_WARP == 8, "a warp's slots are a copy");

  const CacheView& cache;
  const PanelMap* map;  // WIDE: a warp's slots come by the copy engine where all were written; null: by its lanes
  Room room;
  i64 table_row;
  int end, written;     // of the block's slots, and of those that were written before this kernel

  // Before the first tile.
  DEVICE void prepare() const {
    if (!Room::WIDE || map == nullptr) return;
    if (threadIdx.x == 0)
      for (int i = 0; i < STAGES; ++i) room.arrival(i).create();
    block_sync();
  }
  // The frame that `start` needs of the table, on its way a tile early: of this thread's `slot_of`.
  DEVICE int frame_of_tile(int tile) const { return frame_of(cache, table_row, slot_of(tile)); }
  // Start loading the tile of slots that begins at `tile`; `frame`: its `frame_of_tile`.
  DEVICE void start(int tile, int stage, int frame) const {
    const int warp = warp_number(), slot = slot_of(tile), whole = whole_warps(tile);
    if (warp >= whole) return load(tile, stage, reinterpret_cast<u64>(address_in_frame(cache, frame, slot)));
    if (threadIdx.x % 32 != 0) return;
    if (warp == 0) room.arrival(stage).expect(whole * Room::GROUP);
    copy_panels(*map, room.stage(stage) + warp * Room::GROUP, slot_in_page(cache, slot), frame, room.arrival(stage));
  }
  // Until the tile is there for this thread's products, the newest slot in it: `turn` tiles came to this stage before.
  DEVICE void wait(int tile, int stage, u32 turn) const {
    const int whole = whole_warps(tile);
    if (whole > 0) room.arrival(stage).wait(turn);
    if (whole == WARPS) return;
    copy_async_wait<STAGES - 1>();
    put_newest(stage, written - tile);
    Room::publish();
    block_sync();
  }

 private:
  static DEVICE int warp_number() { return shfl(static_cast<int>(threadIdx.x) / 32, 0); }  // a warp's one: the compiler may know
  // Warps of whose slots every one was written before this launch; behind a tile with less than all comes none.
  DEVICE int whole_warps(int tile) const {
    return Room::WIDE && map != nullptr ? min_int((written - tile) / PER_WARP, WARPS) : 0;
  }
  // The first of the slots that this thread's warp brings; or one of them.
  DEVICE int slot_of(int tile) const {
    const int warp = warp_number(), first = tile + warp * PER_WARP;
    return warp < whole_warps(tile) ? first : min_int(first + static_cast<int>(threadIdx.x) % PER_WARP, end - 1);
  }
  // By this warp; `mine`: where this thread's `slot_of` lies.
  DEVICE void load(int tile, int stage, u64 mine) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int r = 0; r < PER_WARP; ++r) {
      const u8* slot = reinterpret_cast<const u8*>(shfl(mine, r));
      const int at = warp * PER_WARP + r;
      const bool valid = tile + at < written;
      for (int c = lane; c < Room::KD / 8; c += 32) copy_async16(room.slot_piece(stage, at, c), slot + c * 16, valid);
    }
  }
  // The token's own slot to its place `at` within the tile, if it is this kernel's and there: by the threads that brought zeros.
  DEVICE void put_newest(int stage, int at) const {
    if (written == end || at >= TILE || at / PER_WARP != static_cast<int>(threadIdx.x) / 32) return;
    for (int c = threadIdx.x % 32; c < Room::KD / 8; c += 32)
      *reinterpret_cast<uint4*>(room.slot_piece(stage, at, c)) = *reinterpret_cast<const uint4*>(room.newest() + c * 16);
  }
};
