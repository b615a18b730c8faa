// Angles of a step's tokens, and what happens to projected q, k, v where attention does not do it itself.
#include "cache.cuh"
#include "rope.cuh"

constexpr int ROPE_WARPS = 4;

struct RopeTableParams {
  const double* inv_freq;  // (rope_dim / 2)
  const int* positions;    // (tokens)
  float* cos_sin;          // (tokens, rope_dim / 2, 2)
  float factor;            // multiplies cos and sin
  int half;                // rope_dim / 2
};

// One block a token. fp64 angles stay exact at a million tokens.
KERNEL(rope_table, RopeTableParams, 64, 1) {
  grid_launch_dependents();
  grid_wait();
  const int position = p.positions[blockIdx.x];
  for (int j = threadIdx.x; j < p.half; j += 64) {
    const double turns = position * p.inv_freq[j] * 0.15915494309189535;
    float s, c;
    sincos_small(static_cast<float>((turns - round_even(turns)) * 6.283185307179586), &s, &c);
    float* out = p.cos_sin + (static_cast<i64>(blockIdx.x) * p.half + j) * 2;
    out[0] = c * p.factor;
    out[1] = s * p.factor;
  }
}

struct GqaRopeParams {
  GqaInput input;
  const int* positions;   // (tokens): the token's slot
  const int* table_rows;  // (tokens): row of the frame table, or null for the token's own index
  u16* q;                 // (tokens, heads, head_dim) bf16
  CacheView cache;        // a slot holds k of all heads, then v of all heads
};

// Queries to `q`, keys and values to the cache. One warp a head.
KERNEL(gqa_rope_cache, GqaRopeParams, ROPE_WARPS * 32, 1) {
  const GqaInput& in = p.input;
  const int d = in.head_dim, head = blockIdx.y * ROPE_WARPS + threadIdx.x / 32;
  float* v = reinterpret_cast<float*>(dynamic_smem()) + threadIdx.x / 32 * d;
  const i64 t = blockIdx.x;
  grid_launch_dependents();
  grid_wait();
  if (head >= in.heads + 2 * in.kv_heads) return;
  in.prepare(v, t, head);
  u16* out = p.q + (t * in.heads + head) * d;
  if (head >= in.heads) {
    const i64 row = p.table_rows != nullptr ? p.table_rows[t] : t;
    out = reinterpret_cast<u16*>(slot_address(p.cache, row, p.positions[t])) + (head - in.heads) * d;
  }
  for (int i = threadIdx.x % 32; i < d; i += 32) out[i] = bf16_bits(v[i]);
}

struct MlaRopeParams {
  MlaInput input;
  const int* positions;
  const int* table_rows;  // or null
  u16* q;                 // (tokens, heads, latent + rope_dim) bf16
  CacheView cache;        // a slot holds latent, then rope key
};

// Queries that score cache rows to `q`, latent and rope key to the cache. One warp a head; two more for the key.
KERNEL(mla_rope_cache, MlaRopeParams, ROPE_WARPS * 32, 1) {
  const MlaInput& in = p.input;
  const int lane = threadIdx.x % 32, r = in.rope.rope_dim, head = blockIdx.y * ROPE_WARPS + threadIdx.x / 32;
  const int longest = max_int(in.latent, r);
  float* v = reinterpret_cast<float*>(dynamic_smem()) + threadIdx.x / 32 * longest;
  const i64 t = blockIdx.x;
  grid_launch_dependents();
  grid_wait();
  if (head > in.heads + 1) return;
  u16* out = p.q + (t * in.heads + head) * (in.latent + r);
  if (head >= in.heads) {
    const i64 row = p.table_rows != nullptr ? p.table_rows[t] : t;
    out = reinterpret_cast<u16*>(slot_address(p.cache, row, p.positions[t]));
  }
  if (head == in.heads + 1) {
    in.prepare_latent(v, t);
    for (int i = lane; i < in.latent; i += 32) out[i] = bf16_bits(v[i]);
    return;
  }
  in.prepare_rope(v, t, head);
  for (int i = lane; i < r; i += 32) out[in.latent + i] = bf16_bits(v[i]);
  if (head < in.heads)
    for (int i = lane; i < in.latent; i += 32) out[i] = in.q_latent[(t * in.heads + head) * in.latent + i];
}
