// Running softmax and weighted values of a warp's slots, in registers, and the merge of a block's warps.
#pragma once
#include "heads_room.cuh"
#include "slot_share.cuh"

// What a lane keeps of its warp's slots, for heads 2 (lane % 4) + c of every group of 8.
template <class Room>
struct HeadsSums {
  static constexpr int D = Room::D, NT = Room::NT, STEPS = Room::STEPS, WARPS = Room::WARPS, COLS = Room::COLS;
  static constexpr int THREADS = Room::THREADS, MERGE_ROW = Room::MERGE_ROW;

  float m[NT][2], l[NT][2];  // maximum (log2 domain), and this lane's part of the sum
  float o[STEPS][NT][4];     // values as the matrix unit leaves them

  DEVICE void clear() {
#pragma unroll
    for (int n = 0; n < NT; ++n) m[n][0] = m[n][1] = NEG_INF, l[n][0] = l[n][1] = 0.0f;
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
#pragma unroll
      for (int n = 0; n < NT; ++n) o[i][n][0] = o[i][n][1] = o[i][n][2] = o[i][n][3] = 0.0f;
  }

  // Scores to probabilities in place, as pairs of heads; what was summed shrinks. Of the tile slots from `first_seen` to
  // before `last` count.
  DEVICE void softmax(float (&s)[NT][4], u32 (&pairs)[NT][2], int first_seen, int last, float scale_log2) {
    const int slot = Room::first_own() + static_cast<int>(threadIdx.x) % 32 / 4;
    const bool first = slot < last && slot >= first_seen, second = slot + 8 < last && slot + 8 >= first_seen;
    float top[NT][2];
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        s[n][c] = first ? s[n][c] * scale_log2 : NEG_INF;
        s[n][c + 2] = second ? s[n][c + 2] * scale_log2 : NEG_INF;
        top[n][c] = fmaxf(s[n][c], s[n][c + 2]);
      }
#pragma unroll
    for (int mask = 16; mask >= 4; mask >>= 1)
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) top[n][c] = fmaxf(top[n][c], shfl_xor(top[n][c], mask));
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      float shrink[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float next = fmaxf(m[n][c], top[n][c]);
        const float base = next == NEG_INF ? 0.0f : next;  // no slot yet
        shrink[c] = exp2_fast(m[n][c] - base);
        m[n][c] = next;
        s[n][c] = exp2_fast(s[n][c] - base);
        s[n][c + 2] = exp2_fast(s[n][c + 2] - base);
        l[n][c] = l[n][c] * shrink[c] + (s[n][c] + s[n][c + 2]);
      }
      pairs[n][0] = pack_bf16(s[n][0], s[n][1]);
      pairs[n][1] = pack_bf16(s[n][2], s[n][3]);
#pragma unroll
      for (int i = 0; i < STEPS; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) o[i][n][c] *= shrink[c % 2];
    }
  }

  // o (D x heads) += v^T (D x 16 slots) * probabilities (16 slots x heads).
  DEVICE void add_values(const Room& room, int stage, const u32 (&pairs)[NT][2]) {
    const int lane = threadIdx.x % 32;
    u32 b[NT][2];
#pragma unroll
    for (int n = 0; n < NT; ++n) b[n][0] = transpose_8x8(pairs[n][0]), b[n][1] = transpose_8x8(pairs[n][1]);
    // Matrices 0..3: slots 0-7 rows d 0-7, slots 0-7 rows d 8-15, slots 8-15 rows d 0-7, slots 8-15 rows d 8-15.
    const u8* at = room.value_row(stage, Room::first_own() + lane % 8 + lane / 16 * 8) + lane / 8 % 2 * 16;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      u32 a[4];
      ldmatrix_x4_trans(a, at + i * 32);
#pragma unroll
      for (int n = 0; n < NT; ++n) mma_bf16(o[i][n], a[0], a[1], a[2], a[3], b[n][0], b[n][1]);
    }
  }

  // A split's partial attention, for the merge: that of all warps, which meet where the tile in `stage` was. part: of its
  // first head here.
  DEVICE void write(const AttentionParams& p, i64 part, int heads_here, const Room& room, int stage) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* ml = room.merged_ml();
    float* merge = room.merged(stage);
#pragma unroll
    for (int mask = 16; mask >= 4; mask >>= 1)
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) l[n][c] += shfl_xor(l[n][c], mask);
    block_sync();  // no warp reads the tile any more
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int h = n * 8 + lane % 4 * 2 + c;
        if (lane < 4) ml[(warp * COLS + h) * 2] = m[n][c], ml[(warp * COLS + h) * 2 + 1] = l[n][c];
        float* row = merge + (warp * COLS + h) * MERGE_ROW + lane / 4;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) row[i * 16] = o[i][n][c], row[i * 16 + 8] = o[i][n][c + 2];
      }
    block_sync();
    for (int i = threadIdx.x; i < heads_here * (D / 4); i += THREADS) {
      const int h = i / (D / 4), d = i % (D / 4) * 4;
      float top = NEG_INF, sum = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) top = fmaxf(top, ml[(w * COLS + h) * 2]);
      const float base = top == NEG_INF ? 0.0f : top;  // no slot within the window
      float4 value = float4{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float share = exp2_fast(ml[(w * COLS + h) * 2] - base);
        const float4 v = load_float4(merge + (w * COLS + h) * MERGE_ROW + d);
        sum += share * ml[(w * COLS + h) * 2 + 1];
        value.x += share * v.x, value.y += share * v.y, value.z += share * v.z, value.w += share * v.w;
      }
      *reinterpret_cast<float4*>(p.partial_o + (part + h) * D + d) = value;
      if (d == 0) p.partial_ml[(part + h) * 2] = top, p.partial_ml[(part + h) * 2 + 1] = sum;
    }
  }
};
