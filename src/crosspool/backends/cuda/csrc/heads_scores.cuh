// Scores of a warp's slots, transposed (slots x heads): a group of 8 heads fills the matrix unit's 8 columns.
#pragma once
#include "heads_room.cuh"

// All queries; they serve every tile.
template <class Room>
struct HeadsScores {
  static constexpr int NT = Room::NT, STEPS = Room::STEPS, ROW = Room::ROW;

  u32 b[STEPS][NT][2];  // as the matrix unit takes them

  DEVICE void load_queries(const Room& room) {
    const int lane = threadIdx.x % 32;
    const u8* row = reinterpret_cast<const u8*>(room.query(lane % 8)) + lane / 8 * 16;
#pragma unroll
    for (int step = 0; step < STEPS; step += 2)  // one x4 load covers two steps for 8 heads
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        u32 r[4];
        ldmatrix_x4(r, row + n * 8 * ROW + step * 32);
        b[step][n][0] = r[0], b[step][n][1] = r[1];
        b[step + 1][n][0] = r[2], b[step + 1][n][1] = r[3];
      }
  }
  // Of this warp's 16 slots. Lane l: slots l / 4 and 8 more (c / 2), heads 2 (l % 4) + c % 2.
  DEVICE void make(const Room& room, int stage, float (&s)[NT][4]) const {
    const int lane = threadIdx.x % 32;
    const u8* row = room.key_row(stage, Room::first_own() + lane % 16) + lane / 16 * 16;
    float acc[2][NT][4];  // even and odd steps: two shorter chains
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) acc[0][n][c] = acc[1][n][c] = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      u32 a[4];
      ldmatrix_x4(a, row + step * 32);
#pragma unroll
      for (int n = 0; n < NT; ++n) mma_bf16(acc[step % 2][n], a[0], a[1], a[2], a[3], b[step][n][0], b[step][n][1]);
    }
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) s[n][c] = acc[0][n][c] + acc[1][n][c];
  }
};
