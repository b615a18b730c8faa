// residual (+ partial outputs, in order) -> residual, and its RMSNorm as bf16. One block a token.
#include "common.cuh"

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
  float* row = scratch + 32;                                  // hidden
  const i64 base = static_cast<i64>(blockIdx.x) * p.hidden;
  grid_launch_dependents();
  grid_wait();
  const u16* embedded = p.token_ids != nullptr ? p.embed + static_cast<i64>(p.token_ids[blockIdx.x]) * p.hidden : nullptr;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < p.hidden; i += NORM_THREADS) {
    float v = embedded != nullptr ? bf16_value(embedded[i]) : p.residual_in[base + i];
    for (int n = 0; n < p.num_partials; ++n)
      v += p.partials_are_float ? static_cast<const float*>(p.partials[n])[base + i]
                                : bf16_value(static_cast<const u16*>(p.partials[n])[base + i]);
    row[i] = v;
    squares += v * v;
    if (p.residual_out != nullptr) p.residual_out[base + i] = v;
  }
  const float scale = rsqrt_full(block_sum(squares, scratch, NORM_THREADS) / static_cast<float>(p.hidden) + p.eps);
  for (int i = threadIdx.x; i < p.hidden; i += NORM_THREADS)
    p.normed[base + i] = bf16_bits(row[i] * scale * bf16_value(p.norm_weight[i]));
}
