// Norm and rotation of one head by one warp, in fp32 in shared memory.
#pragma once
#include "common.cuh"

struct RopeView {
  const float* cos_sin;  // (tokens, rope_dim / 2, 2), the attention factor included
  int rope_dim, interleaved;
};

// What one lane needs to turn its E neighbouring elements of any head: pairs meet by one shuffle, so half of rope_dim is E
// times a power of two.
template <int E>
struct LaneTurn {
  float c[E], s[E];
  int lanes;  // distance of a pair's lanes
  bool rotated, is_first, interleaved;

  DEVICE LaneTurn(const RopeView& rope, i64 token) {
    const int at = threadIdx.x % 32 * E, half = rope.rope_dim / 2;
    lanes = half / E;
    rotated = at < rope.rope_dim;
    is_first = at < half;
    interleaved = rope.interleaved;
    const int first = !rotated ? 0 : interleaved ? at / 2 : is_first ? at : at - half;
    const float* table = rope.cos_sin + (token * half + first) * 2;
#pragma unroll
    for (int j = 0; j < E; ++j) {
      const uint2 pair = load8(table + (interleaved ? j / 2 : j) * 2);
      c[j] = rotated ? float_of_bits(pair.x) : 1.0f;
      s[j] = rotated ? float_of_bits(pair.y) : 0.0f;
    }
  }
  DEVICE void turn(float (&x)[E]) const {
    float other[E];
#pragma unroll
    for (int j = 0; j < E; ++j) {
      const float across = shfl_xor(x[j], lanes);
      other[j] = interleaved ? x[j ^ 1] : across;
    }
#pragma unroll
    for (int j = 0; j < E; ++j) {
      const bool minus = interleaved ? j % 2 == 0 : is_first;
      x[j] = x[j] * c[j] + (minus ? -other[j] : other[j]) * s[j];
    }
  }
};

// A lane's E neighbours of a bf16 vector, and back.
template <int E>
struct LanePart {
  u32 pairs[E / 2];
  DEVICE void load(const u16* vector) {
#pragma unroll
    for (int i = 0; i < E / 2; ++i) pairs[i] = *reinterpret_cast<const u32*>(vector + threadIdx.x % 32 * E + 2 * i);
  }
  DEVICE void unpack(float (&x)[E]) const {
#pragma unroll
    for (int i = 0; i < E / 2; ++i) x[2 * i] = bf16_low(pairs[i]), x[2 * i + 1] = bf16_high(pairs[i]);
  }
  static DEVICE void store(u16* vector, const float (&x)[E]) {
#pragma unroll
    for (int i = 0; i < E / 2; ++i)
      *reinterpret_cast<u32*>(vector + threadIdx.x % 32 * E + 2 * i) = pack_bf16(x[2 * i], x[2 * i + 1]);
  }
};

// x *= weight / RMS(x) over the warp's lanes.
template <int E>
DEVICE void norm_part(float (&x)[E], const LanePart<E>& weight, float eps) {
  float w[E], squares = 0.0f;
  weight.unpack(w);
#pragma unroll
  for (int i = 0; i < E; ++i) squares += x[i] * x[i];
  const float scale = reciprocal_root(warp_sum(squares) / static_cast<float>(E * 32) + eps);
#pragma unroll
  for (int i = 0; i < E; ++i) x[i] *= scale * w[i];
}

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
  return reciprocal_root(warp_sum(squares) / static_cast<float>(count) + eps);
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

  DEVICE const u16* vector(i64 token, int head) const { return qkv + (token * (heads + 2 * kv_heads) + head) * head_dim; }
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
  DEVICE const u16* rope_part(i64 token, int head) const {
    return head < heads ? q + token * q_stride + static_cast<i64>(head) * (nope + rope.rope_dim) + nope
                        : kv_a + token * kv_a_stride + latent;
  }
  DEVICE void prepare_rope(float* v, i64 token, int head) const {
    scale_head(v, rope_part(token, head), nullptr, 1.0f, rope.rope_dim);
    rotate_head(rope, v, token);
  }
  DEVICE void prepare_latent(float* v, i64 token) const {
    const u16* in = kv_a + token * kv_a_stride;
    scale_head(v, in, kv_a_norm, head_scale(in, latent, eps), latent);
  }
};
