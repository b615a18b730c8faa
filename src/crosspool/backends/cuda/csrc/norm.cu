// residual (+ partial outputs, in order) -> residual, and its RMSNorm as bf16. One block a token.
#include "norm_row.cuh"

constexpr int MAX_PARTIALS = 8;
constexpr int NORM_THREADS = 256;

struct NormParams {
  const float* residual_in;  // (tokens, hidden) fp32, or null where token_ids are given
  const int* token_ids;      // (tokens) or null: the residual starts from these rows of `embed`
  const u16* embed;          // (vocab, hidden) bf16
  const void* partials[MAX_PARTIALS];  // (tokens, hidden) each; fp32 or bf16
  const u16* norm_weight;    // (hidden) bf16
  float* residual_out;       // (tokens, hidden) fp32, or null; may be residual_in
  u16* normed;               // (tokens, hidden) bf16
  int hidden, num_partials, partials_are_float;
  float eps;
};

KERNEL(residual_norm, NormParams, NORM_THREADS, 1) {
  float* scratch = reinterpret_cast<float*>(dynamic_smem());  // 32
  const i64 base = static_cast<i64>(blockIdx.x) * p.hidden;
  NormRow<NORM_THREADS> row(p.norm_weight, p.hidden);
  grid_launch_dependents();
  grid_wait();
  if (p.token_ids != nullptr) row.read(p.embed + static_cast<i64>(p.token_ids[blockIdx.x]) * p.hidden);
  else row.read(p.residual_in + base);
  for (int n = 0; n < p.num_partials; ++n) {
    if (p.partials_are_float) row.add(static_cast<const float*>(p.partials[n]) + base);
    else row.add(static_cast<const u16*>(p.partials[n]) + base);
  }
  if (p.residual_out != nullptr) row.write(p.residual_out + base);
  const float scale = row.scale(scratch, p.eps);
#pragma unroll
  for (int n = 0; n < ROW_GROUPS; ++n)
    if (row.inside(n)) *reinterpret_cast<uint4*>(p.normed + base + row.index(n)) = row.normed(n, scale);
}
