// Where a token's cache row lies: frame_table[row][page][layer's frame] -> frame -> layer's part -> slot.
#pragma once
#include "common.cuh"

struct CacheView {
  u8* frames;              // the arena
  const int* frame_table;  // (rows, pages, frames_per_page), already advanced to this layer's frame
  i64 frame_bytes, layer_offset_bytes;
  i64 table_row_stride;    // ints between two rows
  int table_page_stride;   // ints between two pages: frames_per_page
  int page_tokens, token_bytes;
};

DEVICE u8* slot_address(const CacheView& cache, i64 row, int token) {
  const int page = token / cache.page_tokens;
  const i64 frame = cache.frame_table[row * cache.table_row_stride + static_cast<i64>(page) * cache.table_page_stride];
  return cache.frames + frame * cache.frame_bytes + cache.layer_offset_bytes +
         static_cast<i64>(token - page * cache.page_tokens) * cache.token_bytes;
}
