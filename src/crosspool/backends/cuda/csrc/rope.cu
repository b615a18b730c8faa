// What happens to projected q, k, v before attention: norms, rotation, and the write into the cache. One warp a head.
#include "cache.cuh"

constexpr int ROPE_WARPS = 4;
constexpr int MAX_HEAD = 576;  // widest vector one warp handles: an MLA cache row's latent

struct RopeParams {
  const double* inv_freq;  // (rope_dim / 2)
  float factor;            // multiplies cos and sin
  int rope_dim, interleaved;
};

// Rotate `rope_dim` elements at `v`, in place; the warp's lanes share the pairs. fp64 angles stay exact at 1M tokens.
DEVICE void rotate(const RopeParams& rope, float* v, int position) {
  const int half = rope.rope_dim / 2;
  for (int j = threadIdx.x % 32; j < half; j += 32) {
    const double turns = position * rope.inv_freq[j] * 0.15915494309189535;
    float s, c;
    sincos_small(static_cast<float>((turns - round_even(turns)) * 6.283185307179586), &s, &c);
    s *= rope.factor;
    c *= rope.factor;
    const int first = rope.interleaved ? 2 * j : j, second = rope.interleaved ? 2 * j + 1 : j + half;
    const float a = v[first], b = v[second];
    v[first] = a * c - b * s;
    v[second] = b * c + a * s;
  }
  warp_sync();
}

DEVICE float warp_squares(const u16* v, int count) {
  float squares = 0.0f;
  for (int i = threadIdx.x % 32; i < count; i += 32) squares += bf16_value(v[i]) * bf16_value(v[i]);
  return warp_sum(squares);
}

struct GqaRopeParams {
  const u16* qkv;         // (tokens, (heads + 2 kv_heads) * head_dim) bf16: q, then k, then v
  const u16* q_norm;      // (head_dim), or (heads * head_dim) where norm_full, or null
  const u16* k_norm;
  const int* positions;   // (tokens): the token's slot
  const int* table_rows;  // (tokens): row of the frame table, or null for the token's own index
  u16* q;                 // (tokens, heads, head_dim) bf16
  RopeParams rope;
  CacheView cache;        // a slot holds k of all heads, then v of all heads
  int tokens, heads, kv_heads, head_dim, norm_full;
  float eps;
};

KERNEL(gqa_rope_cache, GqaRopeParams, ROPE_WARPS * 32, 1) {
  float* v = reinterpret_cast<float*>(dynamic_smem()) + threadIdx.x / 32 * p.head_dim;
  const int lane = threadIdx.x % 32, d = p.head_dim, head = blockIdx.y * ROPE_WARPS + threadIdx.x / 32;
  const i64 t = blockIdx.x;
  grid_launch_dependents();
  grid_wait();
  if (head >= p.heads + 2 * p.kv_heads) return;
  const u16* in = p.qkv + (t * (p.heads + 2 * p.kv_heads) + head) * d;
  const bool is_q = head < p.heads, is_k = !is_q && head < p.heads + p.kv_heads;
  const u16* norm = is_q ? p.q_norm : is_k ? p.k_norm : nullptr;
  float scale = 1.0f;
  if (norm != nullptr) {
    const int first = is_q ? 0 : p.heads, count = is_q ? p.heads : p.kv_heads;
    const float squares = p.norm_full ? warp_squares(in - (head - first) * d, count * d) : warp_squares(in, d);
    scale = rsqrt_full(squares / static_cast<float>(p.norm_full ? count * d : d) + p.eps);
    if (p.norm_full) norm += (head - first) * d;
  }
  for (int i = lane; i < d; i += 32) v[i] = bf16_value(in[i]) * scale * (norm != nullptr ? bf16_value(norm[i]) : 1.0f);
  warp_sync();
  const int position = p.positions[t];
  if (is_q || is_k) rotate(p.rope, v, position);
  u16* out = p.q + (t * p.heads + head) * d;
  if (!is_q) {
    const i64 row = p.table_rows != nullptr ? p.table_rows[t] : t;
    out = reinterpret_cast<u16*>(slot_address(p.cache, row, position)) + (head - p.heads) * d;
  }
  for (int i = lane; i < d; i += 32) out[i] = bf16_bits(v[i]);
}

struct MlaRopeParams {
  const u16* kv_a;          // (tokens, kv_a_stride) bf16: latent, then rope key
  const u16* kv_a_norm;     // (latent) bf16
  const u16* q;             // (tokens, q_stride) bf16, per head: nope, then rope
  const int* positions;
  const int* table_rows;    // or null
  u16* q_latent;            // (tokens, heads, latent + rope_dim) bf16: only the rope part is written here
  RopeParams rope;
  CacheView cache;          // a slot holds latent, then rope key
  i64 kv_a_stride, q_stride;
  int tokens, heads, latent, nope;
  float eps;
};

KERNEL(mla_rope_cache, MlaRopeParams, ROPE_WARPS * 32, 1) {
  float* v = reinterpret_cast<float*>(dynamic_smem()) + threadIdx.x / 32 * MAX_HEAD;
  const int lane = threadIdx.x % 32, r = p.rope.rope_dim, head = blockIdx.y * ROPE_WARPS + threadIdx.x / 32;
  const i64 t = blockIdx.x;
  grid_launch_dependents();
  grid_wait();
  if (head > p.heads + 1) return;
  const int position = p.positions[t];
  const i64 row = p.table_rows != nullptr ? p.table_rows[t] : t;
  const u16* in = p.kv_a + t * p.kv_a_stride;
  u16* slot = reinterpret_cast<u16*>(slot_address(p.cache, row, position));
  if (head == p.heads + 1) {  // the latent: normalised, not rotated
    const float scale = rsqrt_full(warp_squares(in, p.latent) / static_cast<float>(p.latent) + p.eps);
    for (int i = lane; i < p.latent; i += 32) slot[i] = bf16_bits(bf16_value(in[i]) * scale * bf16_value(p.kv_a_norm[i]));
    return;
  }
  const bool is_key = head == p.heads;
  const u16* from = is_key ? in + p.latent : p.q + t * p.q_stride + static_cast<i64>(head) * (p.nope + r) + p.nope;
  for (int i = lane; i < r; i += 32) v[i] = bf16_value(from[i]);
  warp_sync();
  rotate(p.rope, v, position);
  u16* out = is_key ? slot + p.latent : p.q_latent + (t * p.heads + head) * (p.latent + r) + p.latent;
  for (int i = lane; i < r; i += 32) out[i] = bf16_bits(v[i]);
}
