// Where a token's cache row lies: frame_table[row][page][layer's frame] -> frame -> layer's part -> slot.
#pragma once
#include "common.cuh"

struct CacheView {
  u8* frames;              // the arena
  const int* frame_table;  // (rows, pages, frames_per_page), already advanced to this layer's frame
  i64 frame_bytes, layer_offset_bytes;
  i64 table_row_stride;    // ints between two rows
  u64 page_share;          // 2^40 / page_tokens, rounded up
  int table_page_stride;   // ints between two pages: frames_per_page
  int page_tokens, token_bytes;
};

// A division takes twenty instructions, each of which waits for the one before.
DEVICE int page_of(const CacheView& cache, int token) { return static_cast<int>(static_cast<u32>(token) * cache.page_share >> 40); }
DEVICE int slot_in_page(const CacheView& cache, int token) { return token - page_of(cache, token) * cache.page_tokens; }
DEVICE int frame_of(const CacheView& cache, i64 row, int token) {
  return cache.frame_table[row * cache.table_row_stride + static_cast<i64>(page_of(cache, token)) * cache.table_page_stride];
}
DEVICE u8* address_in_frame(const CacheView& cache, int frame, int token) {
  return cache.frames + frame * cache.frame_bytes + cache.layer_offset_bytes +
         static_cast<i64>(slot_in_page(cache, token)) * cache.token_bytes;
}
DEVICE u8* slot_address(const CacheView& cache, i64 row, int token) {
  return address_in_frame(cache, frame_of(cache, row, token), token);
}
