// Running softmax and weighted values of the tiles of a split, in registers.
#pragma once
#include "latents_room.cuh"
#include "slot_share.cuh"

// What one thread keeps of all tiles.
template <class Room>
struct LatentsSums {
  static constexpr int VD = Room::VD, NT = Room::NT, TILE = Room::TILE, WARPS = Room::WARPS, HEADS = Room::HEADS;
  static constexpr int COLS = Room::COLS, K_ROW = Room::K_ROW, P_ROW = Room::P_ROW, V_TILES = Room::V_TILES;
  static constexpr int K_PARTS = Room::K_PARTS, S_STRIDE = Room::S_STRIDE, GROUP = Room::GROUP;
  static constexpr bool WIDE = Room::WIDE;

  float m[HEADS], l[HEADS];  // of heads warp, warp + WARPS, ...: maximum (log2 domain), and a lane's part of the sum
  float o[V_TILES][NT][4];   // value_dim x heads, as the matrix unit leaves them

  DEVICE void clear() {
#pragma unroll
    for (int j = 0; j < HEADS; ++j) m[j] = NEG_INF, l[j] = 0.0f;
#pragma unroll
    for (int i = 0; i < V_TILES; ++i)
#pragma unroll
      for (int n = 0; n < NT; ++n) o[i][n][0] = o[i][n][1] = o[i][n][2] = o[i][n][3] = 0.0f;
  }

  // Scores to probabilities; a warp owns heads warp, warp + WARPS, ... Its heads go side by side, so that their shuffles
  // overlap. slots: of the tile, from its first on.
  DEVICE void softmax(const Room& room, int slots, float scale_log2) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float* s = room.scores(0);
    float* alpha = room.alpha();
    float v[HEADS][TILE / 32], top[HEADS], sum[HEADS], shrink[HEADS];
#pragma unroll
    for (int j = 0; j < HEADS; ++j) {
      const int h = warp + j * WARPS;
      top[j] = NEG_INF;
#pragma unroll
      for (int i = 0; i < TILE / 32; ++i) {
        const int slot = lane + i * 32;
        float x = s[h * S_STRIDE + slot];
#pragma unroll
        for (int part = 1; part < K_PARTS; ++part) x += s[(part * COLS + h) * S_STRIDE + slot];
        v[j][i] = slot < slots ? x * scale_log2 : NEG_INF;
        top[j] = fmaxf(top[j], v[j][i]);
      }
    }
#pragma unroll
    for (int mask = 16; mask; mask >>= 1)
#pragma unroll
      for (int j = 0; j < HEADS; ++j) top[j] = fmaxf(top[j], shfl_xor(top[j], mask));
#pragma unroll
    for (int j = 0; j < HEADS; ++j) {
      const float next = fmaxf(m[j], top[j]);
      shrink[j] = exp2_fast(m[j] - next);
      m[j] = next;
      sum[j] = 0.0f;
#pragma unroll
      for (int i = 0; i < TILE / 32; ++i) {
        const float e = exp2_fast(v[j][i] - next);
        sum[j] += e;
        *room.probability(warp + j * WARPS, lane + i * 32) = bf16_bits(e);
      }
      if (lane == 0) alpha[warp + j * WARPS] = shrink[j];
      l[j] = l[j] * shrink[j] + sum[j];
    }
  }

  // o (value_dim x heads) = o * alpha + v^T p; a warp owns VD / WARPS rows.
  DEVICE void add_values(const Room& room, int stage) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q = lane % 4;
    const float* alpha = room.alpha();
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float first = alpha[n * 8 + 2 * q], second = alpha[n * 8 + 2 * q + 1];
#pragma unroll
      for (int i = 0; i < V_TILES; ++i) {
        o[i][n][0] *= first;
        o[i][n][1] *= second;
        o[i][n][2] *= first;
        o[i][n][3] *= second;
      }
    }
    if constexpr (WIDE) {
      const PanelOperand slots = panel_operand(room.stage(stage) + shfl(warp / 4, 0) * V_TILES * PANEL_GROUP, GROUP);
      const PanelOperand shares = panel_operand(room.probabilities(), PANEL_GROUP);
#pragma unroll
      for (int i = 0; i < V_TILES; ++i) warpgroup_begin(o[i]);
#pragma unroll
      for (int i = 0; i < V_TILES; ++i)
#pragma unroll
        for (int step = 0; step < TILE / 16; ++step)
          warpgroup_mma<COLS, true>(o[i], operand_at(slots, i * PANEL_GROUP + step * 2 * GROUP),
                                    operand_at(shares, step * 32), true);
#pragma unroll
      for (int i = 0; i < V_TILES; ++i) warpgroup_end(o[i]);
    } else {
      multiply(room, room.stage(stage));
    }
  }

  // Take in those of the split behind. All threads; a barrier between.
  DEVICE void fold(const Room& room, const LatentsSums& split) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* folds = room.folds();
#pragma unroll
    for (int j = 0; j < HEADS; ++j) {
      const Fold fold(m[j], split.m[j]);
      l[j] = fold.of(l[j], warp_sum(split.l[j]));
      m[j] = fold.top;
      if (lane == 0) folds[(warp + j * WARPS) * 2] = fold.kept, folds[(warp + j * WARPS) * 2 + 1] = fold.taken;
    }
    block_sync();
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int h = n * 8 + lane % 4 * 2 + c;
        const float kept = folds[h * 2], taken = folds[h * 2 + 1];
#pragma unroll
        for (int i = 0; i < V_TILES; ++i)
#pragma unroll
          for (int row = c; row < 4; row += 2)
            o[i][n][row] = Fold::of(o[i][n][row], kept, split.o[i][n][row], taken);
      }
  }

  // A split's partial attention, for the merge. part: of its first head here. WHOLE: `l` is all lanes' sum already.
  template <bool WHOLE = false>
  DEVICE void write(const AttentionParams& p, i64 part, int heads_here) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < HEADS; ++j) {
      const int h = warp + j * WARPS;
      const float sum = WHOLE ? l[j] : warp_sum(l[j]);
      if (h < heads_here && lane == 0) {
        p.partial_ml[(part + h) * 2] = m[j];
        p.partial_ml[(part + h) * 2 + 1] = sum;
      }
    }
    const int first = (WIDE ? warp / 4 * V_TILES * 64 + warp % 4 * 16 : warp * V_TILES * 16) + lane / 4;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {  // heads: one address, and the rest of their values at fixed distances
        const int h = n * 8 + lane % 4 * 2 + c;
        if (h >= heads_here) continue;
        float* to = p.partial_o + (part + h) * VD + first;
#pragma unroll
        for (int i = 0; i < V_TILES; ++i) {
          to[i * (WIDE ? 64 : 16)] = o[i][n][c];
          to[i * (WIDE ? 64 : 16) + 8] = o[i][n][c + 2];
        }
      }
  }

 private:
  DEVICE void multiply(const Room& room, const u8* v) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < TILE / 32; ++step) {  // 32 slots: two products
      u32 b[NT][4];
#pragma unroll
      for (int n = 0; n < NT; ++n)
        ldmatrix_x4(b[n], room.probabilities() + (n * 8 + lane % 8) * P_ROW + step * 64 + lane / 8 * 16);
#pragma unroll
      for (int i = 0; i < V_TILES; ++i) {
        // Matrices 0..3: slots 0-7 rows d 0-7, slots 0-7 rows d 8-15, slots 8-15 rows d 0-7, slots 8-15 rows d 8-15.
        const u8* at = v + (step * 32 + lane % 8 + lane / 16 * 8) * K_ROW + ((warp * V_TILES + i) * 16 + lane / 8 % 2 * 8) * 2;
        u32 a0[4], a1[4];
        ldmatrix_x4_trans(a0, at);
        ldmatrix_x4_trans(a1, at + 16 * K_ROW);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          mma_bf16(o[i][n], a0[0], a0[1], a0[2], a0[3], b[n][0], b[n][1]);
          mma_bf16(o[i][n], a1[0], a1[1], a1[2], a1[3], b[n][2], b[n][3]);
        }
      }
    }
  }
};
