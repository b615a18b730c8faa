// What surrounds the attention of a chunk. MLA: each token's own latent and rope key to the cache, queries turned, and
// latents of earlier tokens gathered from their frames, so that large products can expand them. For all: parts merged,
// and slots taken from and put into frames, which is how a prefill rank and a home hand KV to each other.
#include "cache.cuh"
#include "rope.cuh"
#include "system.cuh"

constexpr int MLA_WARPS = 4;

struct MlaChunkParams {
  MlaInput input;         // q_latent is not read
  const int* positions;   // (tokens): the token's slot
  const int* table_rows;  // (tokens): row of the frame table
  u16* q;                 // (tokens, heads, nope + rope_dim) bf16: queries with their rope part turned
  CacheView cache;        // a slot holds latent, then rope key
};

// One warp a head; two more for the rope key and the latent.
KERNEL(mla_chunk, MlaChunkParams, MLA_WARPS * 32, 1) {
  const MlaInput& in = p.input;
  const int lane = threadIdx.x % 32, r = in.rope.rope_dim, head = blockIdx.y * MLA_WARPS + threadIdx.x / 32;
  float* v = reinterpret_cast<float*>(dynamic_smem()) + threadIdx.x / 32 * max_int(in.latent, r);
  const i64 t = blockIdx.x;
  grid_launch_dependents();
  grid_wait();
  if (head > in.heads + 1) return;
  if (head < in.heads) {
    const u16* from = in.rope_part(t, head) - in.nope;
    u16* to = p.q + (t * in.heads + head) * (in.nope + r);
    for (int i = lane * 8; i < in.nope; i += 256) store16(to + i, load16(from + i));
    in.prepare_rope(v, t, head);
    for (int i = lane; i < r; i += 32) to[in.nope + i] = bf16_bits(v[i]);
    return;
  }
  u16* slot = reinterpret_cast<u16*>(slot_address(p.cache, p.table_rows[t], p.positions[t]));
  if (head == in.heads) {
    in.prepare_rope(v, t, head);
    for (int i = lane; i < r; i += 32) slot[in.latent + i] = bf16_bits(v[i]);
    return;
  }
  in.prepare_latent(v, t);
  for (int i = lane; i < in.latent; i += 32) slot[i] = bf16_bits(v[i]);
}

struct GatherSlotsParams {
  CacheView cache;
  const int* table_rows;  // (slots)
  const int* positions;   // (slots)
  u8* out;                // (slots, token_bytes)
  int slots;
};

// One warp a slot; token_bytes is a multiple of 16.
KERNEL(gather_slots, GatherSlotsParams, MLA_WARPS * 32, 1) {
  const int slot = blockIdx.x * MLA_WARPS + threadIdx.x / 32;
  grid_launch_dependents();
  grid_wait();
  if (slot >= p.slots) return;
  const u8* from = slot_address(p.cache, p.table_rows[slot], p.positions[slot]);
  u8* to = p.out + static_cast<i64>(slot) * p.cache.token_bytes;
  for (int i = threadIdx.x % 32 * 16; i < p.cache.token_bytes; i += 512) store16(to + i, load16(from + i));
}

struct ScatterSlotsParams {
  CacheView cache;
  const int* table_rows;  // (slots)
  const int* positions;   // (slots)
  const u8* rows;         // (slots, token_bytes)
  int slots;
};

// The way back: one warp a slot. What a peer has written lies behind a flag that an earlier kernel has waited for.
KERNEL(scatter_slots, ScatterSlotsParams, MLA_WARPS * 32, 1) {
  const int slot = blockIdx.x * MLA_WARPS + threadIdx.x / 32;
  grid_launch_dependents();
  grid_wait();
  if (slot >= p.slots) return;
  const u8* from = p.rows + static_cast<i64>(slot) * p.cache.token_bytes;
  u8* to = slot_address(p.cache, p.table_rows[slot], p.positions[slot]);
  for (int i = threadIdx.x % 32 * 16; i < p.cache.token_bytes; i += 512) store16(to + i, load16(from + i));
}

struct NormRowsParams {
  const u16* x;            // (rows, stride) bf16
  const u16* norm_weight;  // (width)
  u16* out;                // (rows, width) bf16
  i64 stride;
  int width, rows;
  float eps;
};

// RMSNorm of rows inside wider ones, one warp a row.
KERNEL(norm_rows, NormRowsParams, MLA_WARPS * 32, 1) {
  const int row = blockIdx.x * MLA_WARPS + threadIdx.x / 32;
  grid_launch_dependents();
  grid_wait();
  if (row >= p.rows) return;
  const u16* x = p.x + row * p.stride;
  const float scale = head_scale(x, p.width, p.eps);
  for (int i = threadIdx.x % 32; i < p.width; i += 32)
    p.out[static_cast<i64>(row) * p.width + i] = bf16_bits(bf16_value(x[i]) * scale * bf16_value(p.norm_weight[i]));
}

struct MergePartParams {
  const u16* part;        // (rows, heads, width) bf16, strided: attention over other keys, normalised
  const float* log_sums;  // (heads, log_sums_stride): the log of its softmax's sums
  float* acc;             // (rows, heads, width) fp32: what is held, not normalised
  float* sums;            // (rows, heads, 2): maximum (of scores in powers of two) and sum
  i64 row_stride, head_stride, log_sums_stride;
  int rows, heads, width, is_first;  // width: a multiple of 8; is_first: nothing is held yet
};

// One warp a row and head.
KERNEL(merge_part, MergePartParams, MLA_WARPS * 32, 1) {
  const i64 item = static_cast<i64>(blockIdx.x) * MLA_WARPS + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  grid_launch_dependents();
  grid_wait();
  if (item >= static_cast<i64>(p.rows) * p.heads) return;
  const i64 row = item / p.heads, head = item - row * p.heads;
  float top = p.log_sums[head * p.log_sums_stride + row] * 1.4426950408889634f, total = 1.0f, old = 0.0f, fresh = 1.0f;
  float* sums = p.sums + item * 2;
  if (!p.is_first) {
    const float held_top = sums[0], higher = fmaxf(top, held_top);
    old = exp2_fast(held_top - higher);
    fresh = exp2_fast(top - higher);
    total = sums[1] * old + fresh;
    top = higher;
  }
  warp_sync();  // every lane has read the sums
  const u16* part = p.part + row * p.row_stride + head * p.head_stride;
  float* acc = p.acc + item * p.width;
  for (int i = lane * 4; i < p.width; i += 128) {
    const uint2 v = load8(part + i);
    float4 held = p.is_first ? float4{0.0f, 0.0f, 0.0f, 0.0f} : load_float4(acc + i);
    held.x = held.x * old + bf16_low(v.x) * fresh;
    held.y = held.y * old + bf16_high(v.x) * fresh;
    held.z = held.z * old + bf16_low(v.y) * fresh;
    held.w = held.w * old + bf16_high(v.y) * fresh;
    *reinterpret_cast<float4*>(acc + i) = held;
  }
  if (lane == 0) sums[0] = top, sums[1] = total;
}
