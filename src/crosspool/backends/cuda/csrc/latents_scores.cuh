// Scores of a tile of latents, transposed (slots x heads): a group of 8 heads fills the matrix unit's 8 columns.
#pragma once
#include "latents_room.cuh"

// The parts of all queries that this warp takes, where they do not stay in shared memory; they serve every tile.
template <class Room>
struct LatentsScores {
  static constexpr int NT = Room::NT, K_ROW = Room::K_ROW, K_STEPS = Room::K_STEPS, K_PAIRS = Room::K_PAIRS;
  static constexpr int GROUPS = Room::GROUPS, COLS = Room::COLS;

  u32 b[2 * K_PAIRS][NT][2];  // as the matrix unit takes them

  DEVICE void load_queries(const Room& room) {
    const int part = threadIdx.x / 32 / GROUPS, lane = threadIdx.x % 32;
    const u8* row = room.queries() + (lane % 8) * K_ROW + (part * K_STEPS * 16 + lane / 8 * 8) * 2;
#pragma unroll
    for (int step = 0; step < 2 * K_PAIRS; step += 2)  // one x4 load covers two steps for 8 heads; the last may be unused
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        u32 r[4];
        ldmatrix_x4(r, row + n * 8 * K_ROW + step * 32);
        b[step][n][0] = r[0], b[step][n][1] = r[1];
        b[step + 1][n][0] = r[2], b[step + 1][n][1] = r[3];
      }
  }
  // Of 16 slots (this warp's group) over this warp's part of k, to S[part][head][slot].
  DEVICE void make(const Room& room, int stage) const {
    const int part = shfl(static_cast<int>(threadIdx.x) / 32 / GROUPS, 0);  // a warp's one: the compiler may know
    float acc[2][NT][4];  // even and odd steps: two shorter chains
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) acc[0][n][c] = acc[1][n][c] = 0.0f;
    if constexpr (Room::WIDE) {
      // A warpgroup takes half of every panel.
      const PanelOperand keys = panel_operand(room.stage(stage) + part * 64, Room::GROUP);
      const PanelOperand q = panel_operand(room.queries() + part * 64, PANEL_GROUP);
      warpgroup_begin(acc[0]);
#pragma unroll
      for (int step = 0; step < K_STEPS; ++step)
        warpgroup_mma<COLS, false>(acc[0], operand_at(keys, step / 2 * PANEL_GROUP + step % 2 * 32),
                                   operand_at(q, step / 2 * (COLS * PANEL_ROW) + step % 2 * 32), step > 0);
      warpgroup_end(acc[0]);
    } else {
      multiply(room.stage(stage), acc);
    }
    leave(room, acc);
  }

 private:
  DEVICE void multiply(const u8* keys, float (&acc)[2][NT][4]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp % GROUPS, part = warp / GROUPS;
    const u8* row = keys + (group * 16 + lane % 16) * K_ROW + (part * K_STEPS * 16 + lane / 16 * 8) * 2;
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
      u32 a[4];
      ldmatrix_x4(a, row + step * 32);
#pragma unroll
      for (int n = 0; n < NT; ++n) mma_bf16(acc[step % 2][n], a[0], a[1], a[2], a[3], b[step][n][0], b[step][n][1]);
    }
  }
  static DEVICE void leave(const Room& room, const float (&acc)[2][NT][4]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp % GROUPS, part = warp / GROUPS;
    float* s = room.scores(part);
    const int g = lane / 4, q = lane % 4, slot = group * 16 + g;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        s[(n * 8 + 2 * q + c % 2) * Room::S_STRIDE + slot + c / 2 * 8] = acc[0][n][c] + acc[1][n][c];
  }
};
