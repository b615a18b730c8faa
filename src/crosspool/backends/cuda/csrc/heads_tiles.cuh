// Tiles of keys and values on their way to shared memory: every warp brings its own slots.
#pragma once
#include "cache.cuh"
#include "heads_room.cuh"

template <class Room>
struct HeadsTiles {
  static constexpr int D = Room::D, TILE = Room::TILE, OWN = Room::OWN;

  const CacheView& cache;
  Room room;
  i64 table_row, key_offset, value_offset;  // bytes from a slot's start to this KV head's key and value
  int end, written;                         // of the block's slots, and of those that were written before this kernel

  // Where one of this warp's slots of a tile lies: a lane computes one, the table's entry is on its way early.
  DEVICE u64 place_of(int tile) const {
    const int slot = min_int(tile + Room::first_own() + static_cast<int>(threadIdx.x) % OWN, end - 1);
    return reinterpret_cast<u64>(slot_address(cache, table_row, slot));
  }
  // Start loading this warp's slots of the tile that begins at `tile`; `mine`: its `place_of`.
  DEVICE void start(int tile, int stage, u64 mine) const {
    const int lane = threadIdx.x % 32;
#pragma unroll 4
    for (int r = 0; r < OWN; ++r) {
      const u8* slot = reinterpret_cast<const u8*>(shfl(mine, r));
      const int at = Room::first_own() + r;
#pragma unroll
      for (int i = 0; i < D / 4; i += 32) {  // pieces of 16 bytes: the key's, then the value's
        const int c = i + lane;
        if (D / 4 % 32 != 0 && c >= D / 4) continue;
        const bool is_key = c < D / 8;
        copy_async16((is_key ? room.key_row(stage, at) : room.value_row(stage, at)) + (is_key ? c : c - D / 8) * 16,
                     slot + (is_key ? key_offset : value_offset) + (is_key ? c : c - D / 8) * 16, tile + at < written);
      }
    }
  }
};
