// One row of the residual stream in the registers of a block: every load is in flight before the first is used.
#pragma once
#include "system.cuh"

constexpr int ROW_GROUPS = 4;  // groups of 8 elements a thread: rows of up to 8,192 elements in a block of 256

template <int THREADS>
struct NormRow {
  float v[ROW_GROUPS][8];
  uint4 weight[ROW_GROUPS];
  int hidden;

  DEVICE int index(int group) const { return (group * THREADS + threadIdx.x) * 8; }
  DEVICE bool inside(int group) const { return index(group) < hidden; }

  // The norm's weight depends on no kernel before: load it before waiting.
  DEVICE NormRow(const u16* norm_weight, int hidden) : hidden(hidden) {
#pragma unroll
    for (int n = 0; n < ROW_GROUPS; ++n)
      if (inside(n)) weight[n] = load16(norm_weight + index(n));
  }
  DEVICE void read(const float* row) {
#pragma unroll
    for (int n = 0; n < ROW_GROUPS; ++n) {
      if (!inside(n)) continue;
      const float4 a = load_float4(row + index(n)), b = load_float4(row + index(n) + 4);
      v[n][0] = a.x, v[n][1] = a.y, v[n][2] = a.z, v[n][3] = a.w;
      v[n][4] = b.x, v[n][5] = b.y, v[n][6] = b.z, v[n][7] = b.w;
    }
  }
  DEVICE void read(const u16* row) {
#pragma unroll
    for (int n = 0; n < ROW_GROUPS; ++n)
      if (inside(n)) unpack(load16(row + index(n)), v[n]);
  }
  DEVICE void add(const float* row) {
#pragma unroll
    for (int n = 0; n < ROW_GROUPS; ++n) {
      if (!inside(n)) continue;
      const float4 a = load_float4_l2(row + index(n)), b = load_float4_l2(row + index(n) + 4);
      v[n][0] += a.x, v[n][1] += a.y, v[n][2] += a.z, v[n][3] += a.w;
      v[n][4] += b.x, v[n][5] += b.y, v[n][6] += b.z, v[n][7] += b.w;
    }
  }
  // As `add`, of words that carry `epoch`; `wait` tells when to look no more.
  template <class Wait>
  DEVICE void add_words(const u64* row, u32 epoch, Wait wait) {
#pragma unroll
    for (int n = 0; n < ROW_GROUPS; ++n) {
      if (!inside(n)) continue;
      uint4 words[4];
      bool is_whole;
      do {
        is_whole = true;
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = load_words(row + index(n) + 2 * j);
#pragma unroll
        for (int j = 0; j < 4; ++j) is_whole = is_whole && words[j].y == epoch && words[j].w == epoch;
      } while (!is_whole && !wait.is_over());
#pragma unroll
      for (int j = 0; j < 4; ++j)
        v[n][2 * j] += float_of_bits(words[j].x), v[n][2 * j + 1] += float_of_bits(words[j].z);
    }
  }
  DEVICE void add(const u16* row) {
#pragma unroll
    for (int n = 0; n < ROW_GROUPS; ++n) {
      if (!inside(n)) continue;
      float other[8];
      unpack(load16(row + index(n)), other);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[n][j] += other[j];
    }
  }
  DEVICE void write(float* row) const {
#pragma unroll
    for (int n = 0; n < ROW_GROUPS; ++n) {
      if (!inside(n)) continue;
      *reinterpret_cast<float4*>(row + index(n)) = float4{v[n][0], v[n][1], v[n][2], v[n][3]};
      *reinterpret_cast<float4*>(row + index(n) + 4) = float4{v[n][4], v[n][5], v[n][6], v[n][7]};
    }
  }
  // 1 / RMS of the row; all threads of the block. `scratch` holds THREADS / 32 floats.
  DEVICE float scale(float* scratch, float eps) const {
    float squares = 0.0f;
#pragma unroll
    for (int n = 0; n < ROW_GROUPS; ++n) {
      if (!inside(n)) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) squares += v[n][j] * v[n][j];
    }
    return reciprocal_root(block_sum(squares, scratch, THREADS) * reciprocal(static_cast<float>(hidden)) + eps);
  }
  // Eight normed elements as bf16: where they belong is `index(group)`.
  DEVICE uint4 normed(int n, float scale) const {
    float w[8];
    unpack(weight[n], w);
    return uint4{pack_bf16(v[n][0] * scale * w[0], v[n][1] * scale * w[1]),
                 pack_bf16(v[n][2] * scale * w[2], v[n][3] * scale * w[3]),
                 pack_bf16(v[n][4] * scale * w[4], v[n][5] * scale * w[5]),
                 pack_bf16(v[n][6] * scale * w[6], v[n][7] * scale * w[7])};
  }
  static DEVICE void unpack(uint4 from, float (&to)[8]) {
    to[0] = bf16_low(from.x), to[1] = bf16_high(from.x), to[2] = bf16_low(from.y), to[3] = bf16_high(from.y);
    to[4] = bf16_low(from.z), to[5] = bf16_high(from.z), to[6] = bf16_low(from.w), to[7] = bf16_high(from.w);
  }
};
