// y[t, group, r] = sum_k weight[group, r, k] * x[t, group, k] (+ bias[r]) (+ residual[t, r]), for few tokens t.
#pragma once
#include "tile.cuh"

struct GemvParams {
  const u16* weight;       // (groups, rows, k) bf16
  const void* x;           // (tokens, x_stride) bf16, or fp32 where x_is_float (only with norm_weight)
  const u16* norm_weight;  // (k) bf16 or null: x is RMS-normalised over k first
  const u16* bias;         // (rows) bf16 or null
  const float* residual;   // (tokens, rows) fp32 or null
  void* y;                 // (tokens, y_stride) bf16, or fp32 where y_is_float
  i64 weight_group_stride, x_group_stride, y_group_stride;  // elements
  i64 x_stride, y_stride;                                   // elements
  int rows, k, tokens, x_is_float, y_is_float;
  float norm_eps;
};
