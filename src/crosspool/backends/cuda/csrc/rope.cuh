// Norm and rotation of one head by one warp, in fp32 in shared memory.
#pragma once
#include "common.cuh"

struct RopeView {
  const float* cos_sin;  // (tokens, rope_dim / 2, 2), the attention factor included
  int rope_dim, interleaved;
};

// v[i] = in[i] * scale * norm[i]; `norm` may be null.
DEVICE void scale_head(float* v, const u16* in, const u16* norm, float scale, int count) {
  for (int i = threadIdx.x % 32; i < count; i += 32)
    v[i] = bf16_value(in[i]) * scale * (norm != nullptr ? bf16_value(norm[i]) : 1.0f);
  warp_sync();
}

// Turn the first `rope_dim` elements at `v` by the token's angles, in place.
DEVICE void rotate_head(const RopeView& rope, float* v, i64 token) {
  const int half = rope.rope_dim / 2;
  for (int j = threadIdx.x % 32; j < half; j += 32) {
    const float c = rope.cos_sin[(token * half + j) * 2], s = rope.cos_sin[(token * half + j) * 2 + 1];
    const int first = rope.interleaved ? 2 * j : j, second = rope.interleaved ? 2 * j + 1 : j + half;
    const float a = v[first], b = v[second];
    v[first] = a * c - b * s;
    v[second] = b * c + a * s;
  }
  warp_sync();
}

DEVICE float head_scale(const u16* v, int count, float eps) {
  float squares = 0.0f;
  for (int i = threadIdx.x % 32; i < count; i += 32) squares += bf16_value(v[i]) * bf16_value(v[i]);
  return rsqrt_full(warp_sum(squares) / static_cast<float>(count) + eps);
}

// q, k, v of one token as projected, and what turns them into queries and a cache row.
struct GqaInput {
  const u16* qkv;         // (tokens, (heads + 2 kv_heads) * head_dim) bf16: q, then k, then v
  const u16* q_norm;      // (head_dim), or (heads * head_dim) where norm_full, or null
  const u16* k_norm;
  RopeView rope;
  int heads, kv_heads, head_dim, norm_full;
  float eps;

  // Vector `head` of a token (queries, then keys, then values), as attention sees it, to `v`.
  DEVICE void prepare(float* v, i64 token, int head) const {
    const u16* in = qkv + (token * (heads + 2 * kv_heads) + head) * head_dim;
    const bool is_q = head < heads, is_k = !is_q && head < heads + kv_heads;
    const u16* norm = is_q ? q_norm : is_k ? k_norm : nullptr;
    float scale = 1.0f;
    if (norm != nullptr) {
      const int first = is_q ? 0 : heads, count = is_q ? heads : kv_heads;
      scale = norm_full ? head_scale(in - (head - first) * head_dim, count * head_dim, eps) : head_scale(in, head_dim, eps);
      if (norm_full) norm += (head - first) * head_dim;
    }
    scale_head(v, in, norm, scale, head_dim);
    if (is_q || is_k) rotate_head(rope, v, token);
  }

  // The same as bf16 to `out` in shared memory, for head_dim D: a lane holds D / 32 neighbours, so that every load is
  // in flight at once and pairs meet by one shuffle. `v`: D floats of scratch for the shapes that do not fit this.
  template <int D>
  DEVICE void prepare_row(u16* out, float* v, i64 token, int head) const {
    constexpr int E = D / 32;
    const int lane = threadIdx.x % 32, half = rope.rope_dim / 2, lanes = half / E;
    const bool turns = head < heads + kv_heads, fits = half % E == 0 && (lanes & (lanes - 1)) == 0;
    if (!fits || (norm_full && turns)) {
      prepare(v, token, head);
      for (int i = lane; i < D; i += 32) out[i] = bf16_bits(v[i]);
      return;
    }
    const u16* in = qkv + (token * (heads + 2 * kv_heads) + head) * D + lane * E;
    const u16* norm = !turns ? nullptr : head < heads ? q_norm : k_norm;
    const bool rotated = turns && lane * E < rope.rope_dim;
    float x[E], w[E], c[E], s[E];
#pragma unroll
    for (int i = 0; i < E; i += 2) {
      const u32 pair = *reinterpret_cast<const u32*>(in + i);
      const u32 weights = norm != nullptr ? *reinterpret_cast<const u32*>(norm + lane * E + i) : 0x3f803f80u;
      x[i] = bf16_low(pair), x[i + 1] = bf16_high(pair);
      w[i] = bf16_low(weights), w[i + 1] = bf16_high(weights);
#pragma unroll
      for (int j = i; j < i + 2; ++j) {
        const int at = rope.interleaved ? (lane * E + j) / 2 : (lane * E + j) % half;
        c[j] = 1.0f, s[j] = 0.0f;
        if (rotated) c[j] = rope.cos_sin[(token * half + at) * 2], s[j] = rope.cos_sin[(token * half + at) * 2 + 1];
      }
    }
    if (norm != nullptr) {
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < E; ++i) squares += x[i] * x[i];
      const float scale = rsqrt_full(warp_sum(squares) / static_cast<float>(D) + eps);
#pragma unroll
      for (int i = 0; i < E; ++i) x[i] *= scale * w[i];
    }
    const bool is_first = lane * E < half;  // of a pair apart
#pragma unroll
    for (int i = 0; i < E; i += 2) {
      float other[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float across = shfl_xor(x[i + j], lanes);
        other[j] = rope.interleaved ? x[i + 1 - j] : across;
      }
      float y[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const bool minus = rope.interleaved ? j == 0 : is_first;
        y[j] = rotated ? x[i + j] * c[i + j] + (minus ? -other[j] : other[j]) * s[i + j] : x[i + j];
      }
      *reinterpret_cast<u32*>(out + lane * E + i) = pack_bf16(y[0], y[1]);
    }
  }
};

struct MlaInput {
  const u16* q_latent;   // (tokens, heads, latent) bf16: absorbed queries
  const u16* q;          // (tokens, q_stride) bf16, per head: nope, then rope
  const u16* kv_a;       // (tokens, kv_a_stride) bf16: latent, then rope key
  const u16* kv_a_norm;  // (latent) bf16
  RopeView rope;
  i64 q_stride, kv_a_stride;
  int heads, latent, nope;
  float eps;

  // The rope part of query `head`; head `heads` is the key.
  DEVICE void prepare_rope(float* v, i64 token, int head) const {
    const u16* in = head < heads ? q + token * q_stride + static_cast<i64>(head) * (nope + rope.rope_dim) + nope
                                 : kv_a + token * kv_a_stride + latent;
    scale_head(v, in, nullptr, 1.0f, rope.rope_dim);
    rotate_head(rope, v, token);
  }
  DEVICE void prepare_latent(float* v, i64 token) const {
    const u16* in = kv_a + token * kv_a_stride;
    scale_head(v, in, kv_a_norm, head_scale(in, latent, eps), latent);
  }
};
