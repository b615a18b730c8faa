// One block of decode attention: one token, one group of up to 8 * NT query heads of one KV head, one range of slots.
//
// Scores are computed transposed (slots x heads): a group of 8 heads fills the matrix unit's 8 columns. Tiles of slots
// come through shared memory, STAGES - 1 ahead. Slots of earlier steps do not depend on the kernel before, so their
// loads start before the wait for it. Then each block norms and rotates its own queries; the block whose range holds
// the newest slot makes that slot from the projections, writes it to the cache and patches it into its tile.
#pragma once
#include "attention.cuh"

template <int KD, int VD, bool SEPARATE, int NT, int TILE, int STAGES, int WARPS>
struct Attention {
  static constexpr int THREADS = WARPS * 32;
  static constexpr int COLS = NT * 8;
  static constexpr int K_ROW = KD * 2 + 16;                  // bytes; 16 of padding against bank conflicts
  static constexpr int V_ROW = SEPARATE ? VD * 2 + 16 : 0;
  static constexpr int STAGE = TILE * (K_ROW + V_ROW);
  static constexpr int P_ROW = TILE * 2 + 16;
  static constexpr int S_STRIDE = TILE + 4;                  // floats
  static constexpr int GROUPS = TILE / 16, K_PARTS = WARPS / GROUPS;
  static constexpr int K_STEPS = KD / 16 / K_PARTS, K_PAIRS = (K_STEPS + 1) / 2;
  static constexpr int V_TILES = VD / 16 / WARPS;
  static constexpr int S_BYTES = K_PARTS * COLS * S_STRIDE * 4, P_BYTES = COLS * P_ROW;
  static constexpr int HEAD_BYTES = WARPS * VD * 4;          // one head a warp, before the first scores
  static constexpr int WORK_BYTES = S_BYTES + P_BYTES > HEAD_BYTES ? S_BYTES + P_BYTES : HEAD_BYTES;
  static constexpr int OFF_Q = STAGES * STAGE;
  static constexpr int OFF_S = OFF_Q + COLS * K_ROW;
  static constexpr int OFF_P = OFF_S + S_BYTES;
  static constexpr int OFF_ALPHA = OFF_S + WORK_BYTES;
  static constexpr int OFF_NEWEST = OFF_ALPHA + COLS * 4;
  static constexpr int NEWEST = (KD + (SEPARATE ? VD : 0)) * 2;
  static constexpr int SMEM = OFF_NEWEST + NEWEST;
  static_assert(GROUPS * K_PARTS == WARPS && K_STEPS * K_PARTS * 16 == KD && V_TILES * WARPS * 16 == VD, "shape");
  static_assert(STAGE % 16 == 0 && OFF_P % 16 == 0 && OFF_NEWEST % 16 == 0 && SMEM <= 227 * 1024, "shared memory");

  static constexpr int VALUE = VD, V_HEADS = NT;

  // What one thread keeps of all tiles.
  struct Sums {
    float m[COLS / WARPS], l[COLS / WARPS];  // of heads warp, warp + WARPS, ...: maximum (log2 domain) and sum
    float o[V_TILES][NT][4];                 // value_dim x heads, as the matrix unit leaves them
  };

  const AttentionParams& p;
  u8* smem;
  i64 token, table_row;
  int kv_head, head0, heads_here, begin, end, tiles, window_begin;
  bool has_newest;  // the range's last slot is the token's own
  bool is_writer;   // ... and this block writes it to the cache

  static DEVICE Attention here(const AttentionParams& p) {
    const int group = p.heads / p.kv_heads, groups_per_kv = ceil_div(group, COLS);
    const int kv_head = blockIdx.y / groups_per_kv, head0 = kv_head * group + blockIdx.y % groups_per_kv * COLS;
    const i64 token = blockIdx.z;
    const int length = p.lengths[token];
    const SplitRange range = split_range(p, length, blockIdx.x, TILE);
    const int tiles = range.end > range.begin ? ceil_div(range.end - range.begin, TILE) : 0;
    return Attention{p, dynamic_smem(), token, p.table_rows != nullptr ? p.table_rows[token] : token,
                     kv_head, head0, min_int((kv_head + 1) * group - head0, COLS), range.begin, range.end, tiles,
                     p.window > 0 ? max_int(length - p.window, 0) : 0,
                     tiles > 0 && range.end == length && p.q == nullptr, blockIdx.y % groups_per_kv == 0};
  }

  // Where one of a warp's TILE / WARPS slots of a tile lies: a lane computes one, the table's entry is on its way early.
  DEVICE u64 slot_of(int tile) const {
    constexpr int PER_WARP = TILE / WARPS;
    const int slot = min_int(tile + static_cast<int>(threadIdx.x) / 32 * PER_WARP + static_cast<int>(threadIdx.x) % 32 % PER_WARP, end - 1);
    return reinterpret_cast<u64>(slot_address(p.cache, table_row, slot));
  }
  // Start loading the tile of slots that begins at `tile`; `mine`: its `slot_of`.
  DEVICE void load_tile(int tile, int stage, u64 mine) const {
    constexpr int PER_WARP = TILE / WARPS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u8* rows = smem + stage * STAGE;
#pragma unroll 4
    for (int r = 0; r < PER_WARP; ++r) {
      const u8* slot = reinterpret_cast<const u8*>(shfl(mine, r));
      const int at = warp * PER_WARP + r;
      const bool valid = tile + at < (has_newest ? end - 1 : end);
      for (int c = lane; c < (KD + (SEPARATE ? VD : 0)) / 8; c += 32) {
        if (!SEPARATE || c < KD / 8)
          copy_async16(rows + at * K_ROW + c * 16, slot + kv_head * p.key_head_bytes + c * 16, valid);
        else
          copy_async16(rows + TILE * K_ROW + at * V_ROW + (c - KD / 8) * 16,
                       slot + p.value_offset_bytes + kv_head * p.value_head_bytes + (c - KD / 8) * 16, valid);
      }
    }
  }

  static constexpr int HEADS = COLS / WARPS;  // queries a warp makes
  static constexpr int LANE = KD / 32;        // elements of a query a lane holds (SEPARATE)
  static constexpr int ROPE_LANE = (KD - VD) / 32 > 0 ? (KD - VD) / 32 : 2;

  DEVICE u16* query(int h) const { return reinterpret_cast<u16*>(smem + OFF_Q + h * K_ROW); }

  // Queries of this block's heads, normed and rotated, to shared memory; zeros for heads that are not there.
  // Loads of all of a warp's heads are issued before the first is used.
  DEVICE void prepare_queries() const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int h = heads_here + warp; h < COLS; h += WARPS)
      for (int i = lane; i < KD / 8; i += 32) reinterpret_cast<uint4*>(query(h))[i] = uint4{0, 0, 0, 0};
    if (p.q != nullptr) {
      for (int i = threadIdx.x; i < heads_here * (KD / 8); i += THREADS)
        reinterpret_cast<uint4*>(query(i / (KD / 8)))[i % (KD / 8)] =
            load16(p.q + (token * p.heads + head0 + i / (KD / 8)) * KD + i % (KD / 8) * 8);
    } else if constexpr (SEPARATE) {
      if (p.gqa.fits(LANE)) return prepare_parts();
      float* v = reinterpret_cast<float*>(smem + OFF_S) + warp * VD;
      for (int h = warp; h < heads_here; h += WARPS) {
        p.gqa.prepare(v, token, head0 + h);
        for (int i = lane; i < KD; i += 32) query(h)[i] = bf16_bits(v[i]);
        warp_sync();  // before the next head overwrites v
      }
    } else {
      prepare_latents();
    }
  }

  DEVICE void prepare_parts() const {
    const int warp = threadIdx.x / 32;
    const LaneTurn<LANE> turn(p.gqa.rope, token);
    LanePart<LANE> parts[HEADS], weight{};
    if (p.gqa.q_norm != nullptr) weight.load(p.gqa.q_norm);
#pragma unroll
    for (int n = 0; n < HEADS; ++n)
      if (warp + n * WARPS < heads_here) parts[n].load(p.gqa.vector(token, head0 + warp + n * WARPS));
#pragma unroll
    for (int n = 0; n < HEADS; ++n) {
      if (warp + n * WARPS >= heads_here) continue;
      float x[LANE];
      parts[n].unpack(x);
      if (p.gqa.q_norm != nullptr) norm_part(x, weight, p.gqa.eps);
      turn.turn(x);
      LanePart<LANE>::store(query(warp + n * WARPS), x);
    }
  }

  DEVICE void prepare_latents() const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const LaneTurn<ROPE_LANE> turn(p.mla.rope, token);
    LanePart<ROPE_LANE> parts[HEADS];
    uint4 latents[HEADS][(VD + 255) / 256];
#pragma unroll
    for (int n = 0; n < HEADS; ++n) {
      const int h = warp + n * WARPS;
      if (h >= heads_here) continue;
      parts[n].load(p.mla.rope_part(token, head0 + h));
#pragma unroll
      for (int i = 0; i < VD / 256; ++i)
        latents[n][i] = load16(p.mla.q_latent + (token * p.heads + head0 + h) * VD + (i * 32 + lane) * 8);
    }
#pragma unroll
    for (int n = 0; n < HEADS; ++n) {
      const int h = warp + n * WARPS;
      if (h >= heads_here) continue;
#pragma unroll
      for (int i = 0; i < VD / 256; ++i) reinterpret_cast<uint4*>(query(h))[i * 32 + lane] = latents[n][i];
      float x[ROPE_LANE];
      parts[n].unpack(x);
      turn.turn(x);
      LanePart<ROPE_LANE>::store(query(h) + VD, x);
    }
  }

  // The token's own slot from the projections: to shared memory, and by one block a KV head to the cache.
  DEVICE void prepare_newest(bool write) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp > 1) return;
    u16* newest = reinterpret_cast<u16*>(smem + OFF_NEWEST);
    int at = 0, count = VD;  // what this warp makes of the slot
    i64 offset = 0;          // and where it lies in the cache
    if constexpr (SEPARATE) {
      at = warp * KD;
      offset = warp == 0 ? kv_head * p.key_head_bytes : p.value_offset_bytes + kv_head * p.value_head_bytes;
      const int head = p.heads + warp * p.kv_heads + kv_head;
      if (p.gqa.fits(LANE)) {
        const LaneTurn<LANE> turn(p.gqa.rope, token);
        LanePart<LANE> part, weight{};
        part.load(p.gqa.vector(token, head));
        if (warp == 0 && p.gqa.k_norm != nullptr) weight.load(p.gqa.k_norm);
        float x[LANE];
        part.unpack(x);
        if (warp == 0 && p.gqa.k_norm != nullptr) norm_part(x, weight, p.gqa.eps);
        if (warp == 0) turn.turn(x);
        LanePart<LANE>::store(newest + at, x);
      } else {
        float* v = reinterpret_cast<float*>(smem + OFF_S) + warp * VD;
        p.gqa.prepare(v, token, head);
        for (int i = lane; i < count; i += 32) newest[at + i] = bf16_bits(v[i]);
      }
    } else if (warp == 0) {
      constexpr int E = VD / 32;
      LanePart<E> part, weight;
      part.load(p.mla.kv_a + token * p.mla.kv_a_stride);
      weight.load(p.mla.kv_a_norm);
      float x[E];
      part.unpack(x);
      norm_part(x, weight, p.mla.eps);
      LanePart<E>::store(newest, x);
    } else {
      const LaneTurn<ROPE_LANE> turn(p.mla.rope, token);
      LanePart<ROPE_LANE> part;
      part.load(p.mla.rope_part(token, p.heads));
      float x[ROPE_LANE];
      part.unpack(x);
      turn.turn(x);
      LanePart<ROPE_LANE>::store(newest + VD, x);
      at = VD, count = KD - VD, offset = VD * 2;
    }
    warp_sync();
    if (!write) return;
    u8* slot = slot_address(p.cache, table_row, end - 1) + offset;
    for (int i = lane; i < count / 8; i += 32)
      reinterpret_cast<uint4*>(slot)[i] = reinterpret_cast<const uint4*>(newest + at)[i];
  }

  // Into its tile, once the copies around it have arrived.
  DEVICE void patch_newest(int tile, int stage) const {
    u8* rows = smem + stage * STAGE;
    const int at = end - 1 - tile;
    for (int c = threadIdx.x; c < NEWEST / 16; c += THREADS) {
      u8* to = c < KD / 8 ? rows + at * K_ROW + c * 16 : rows + TILE * K_ROW + at * V_ROW + (c - KD / 8) * 16;
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(smem + OFF_NEWEST + c * 16);
    }
  }

  // This warp's part of k of all queries, as the matrix unit takes them; they serve every tile.
  DEVICE void load_fragments(u32 (&b)[2 * K_PAIRS][NT][2]) const {
    const int part = threadIdx.x / 32 / GROUPS, lane = threadIdx.x % 32;
    const u8* row = smem + OFF_Q + (lane % 8) * K_ROW + (part * K_STEPS * 16 + lane / 8 * 8) * 2;
#pragma unroll
    for (int step = 0; step < 2 * K_PAIRS; step += 2)  // one x4 load covers two steps for 8 heads; the last may be unused
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        u32 r[4];
        ldmatrix_x4(r, row + n * 8 * K_ROW + step * 32);
        b[step][n][0] = r[0], b[step][n][1] = r[1];
        b[step + 1][n][0] = r[2], b[step + 1][n][1] = r[3];
      }
  }

  // Scores of 16 slots (this warp's group) over this warp's part of k, to S[part][head][slot].
  DEVICE void scores(int stage, const u32 (&b)[2 * K_PAIRS][NT][2]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp % GROUPS, part = warp / GROUPS;
    float acc[2][NT][4];  // even and odd steps: two shorter chains
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) acc[0][n][c] = acc[1][n][c] = 0.0f;
    const u8* row = smem + stage * STAGE + (group * 16 + lane % 16) * K_ROW + (part * K_STEPS * 16 + lane / 16 * 8) * 2;
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
      u32 a[4];
      ldmatrix_x4(a, row + step * 32);
#pragma unroll
      for (int n = 0; n < NT; ++n) mma_bf16(acc[step % 2][n], a[0], a[1], a[2], a[3], b[step][n][0], b[step][n][1]);
    }
    float* s = reinterpret_cast<float*>(smem + OFF_S) + part * COLS * S_STRIDE;
    const int g = lane / 4, q = lane % 4, slot = group * 16 + g;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        s[(n * 8 + 2 * q + c % 2) * S_STRIDE + slot + c / 2 * 8] = acc[0][n][c] + acc[1][n][c];
  }

  // Running softmax; a warp owns heads warp, warp + WARPS, ... and keeps their maximum and sum in registers. Its heads go
  // side by side, so that their shuffles overlap.
  DEVICE void softmax(int tile, float (&m)[HEADS], float (&l)[HEADS]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float* s = reinterpret_cast<const float*>(smem + OFF_S);
    float* alpha = reinterpret_cast<float*>(smem + OFF_ALPHA);
    float v[HEADS][TILE / 32], top[HEADS], sum[HEADS], shrink[HEADS];
#pragma unroll
    for (int j = 0; j < HEADS; ++j) {
      const int h = warp + j * WARPS;
      top[j] = NEG_INF;
#pragma unroll
      for (int i = 0; i < TILE / 32; ++i) {
        const int slot = lane + i * 32;
        float x = s[h * S_STRIDE + slot];
#pragma unroll
        for (int part = 1; part < K_PARTS; ++part) x += s[(part * COLS + h) * S_STRIDE + slot];
        v[j][i] = tile + slot < end && tile + slot >= window_begin ? x * p.scale_log2 : NEG_INF;
        top[j] = fmaxf(top[j], v[j][i]);
      }
    }
#pragma unroll
    for (int mask = 16; mask; mask >>= 1)
#pragma unroll
      for (int j = 0; j < HEADS; ++j) top[j] = fmaxf(top[j], shfl_xor(top[j], mask));
#pragma unroll
    for (int j = 0; j < HEADS; ++j) {
      const float next = fmaxf(m[j], top[j]);
      const float base = next == NEG_INF ? 0.0f : next;  // a tile outside the window
      shrink[j] = exp2_fast(m[j] - base);
      m[j] = next;
      sum[j] = 0.0f;
      u16* probabilities = reinterpret_cast<u16*>(smem + OFF_P + (warp + j * WARPS) * P_ROW);
#pragma unroll
      for (int i = 0; i < TILE / 32; ++i) {
        const float e = exp2_fast(v[j][i] - base);
        sum[j] += e;
        probabilities[lane + i * 32] = bf16_bits(e);
      }
      if (lane == 0) alpha[warp + j * WARPS] = shrink[j];
    }
#pragma unroll
    for (int mask = 16; mask; mask >>= 1)
#pragma unroll
      for (int j = 0; j < HEADS; ++j) sum[j] += shfl_xor(sum[j], mask);
#pragma unroll
    for (int j = 0; j < HEADS; ++j) l[j] = l[j] * shrink[j] + sum[j];
  }

  // o (value_dim x heads) = o * alpha + v^T p; a warp owns VD / 4 rows.
  DEVICE void values(int stage, float (&o)[V_TILES][NT][4]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q = lane % 4;
    const float* alpha = reinterpret_cast<const float*>(smem + OFF_ALPHA);
    const u8* v = smem + stage * STAGE + (SEPARATE ? TILE * K_ROW : 0);
    constexpr int ROW = SEPARATE ? V_ROW : K_ROW;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float first = alpha[n * 8 + 2 * q], second = alpha[n * 8 + 2 * q + 1];
#pragma unroll
      for (int i = 0; i < V_TILES; ++i) {
        o[i][n][0] *= first;
        o[i][n][1] *= second;
        o[i][n][2] *= first;
        o[i][n][3] *= second;
      }
    }
#pragma unroll
    for (int step = 0; step < TILE / 32; ++step) {  // 32 slots: two products
      u32 b[NT][4];
#pragma unroll
      for (int n = 0; n < NT; ++n)
        ldmatrix_x4(b[n], smem + OFF_P + (n * 8 + lane % 8) * P_ROW + step * 64 + lane / 8 * 16);
#pragma unroll
      for (int i = 0; i < V_TILES; ++i) {
        // Matrices 0..3: slots 0-7 rows d 0-7, slots 0-7 rows d 8-15, slots 8-15 rows d 0-7, slots 8-15 rows d 8-15.
        const u8* at = v + (step * 32 + lane % 8 + lane / 16 * 8) * ROW + ((warp * V_TILES + i) * 16 + lane / 8 % 2 * 8) * 2;
        u32 a0[4], a1[4];
        ldmatrix_x4_trans(a0, at);
        ldmatrix_x4_trans(a1, at + 16 * ROW);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          mma_bf16(o[i][n], a0[0], a0[1], a0[2], a0[3], b[n][0], b[n][1]);
          mma_bf16(o[i][n], a1[0], a1[1], a1[2], a1[3], b[n][2], b[n][3]);
        }
      }
    }
  }

  // All tiles of the block; ends the wait for the kernel before.
  DEVICE void run(Sums& s) const {
    grid_launch_dependents();
    if (p.q != nullptr) grid_wait();  // the kernel before wrote cache rows
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
      if (i < tiles) load_tile(begin + i * TILE, i, slot_of(begin + i * TILE));
      copy_async_commit();
    }
    u64 upcoming = tiles > 0 ? slot_of(begin + (STAGES - 1) * TILE) : 0;
    if (p.q == nullptr) grid_wait();
    if (tiles > 0) prepare_queries();
    if (has_newest) {
      block_sync();  // the queries' warps are done with the work space
      prepare_newest(is_writer);
    }
#pragma unroll
    for (int j = 0; j < COLS / WARPS; ++j) s.m[j] = NEG_INF, s.l[j] = 0.0f;
#pragma unroll
    for (int i = 0; i < V_TILES; ++i)
#pragma unroll
      for (int n = 0; n < NT; ++n) s.o[i][n][0] = s.o[i][n][1] = s.o[i][n][2] = s.o[i][n][3] = 0.0f;

    u32 fragments[2 * K_PAIRS][NT][2];
    block_sync();  // the queries are there
    if (tiles > 0) load_fragments(fragments);
    for (int i = 0; i < tiles; ++i) {
      const int tile = begin + i * TILE, stage = i % STAGES;
      copy_async_wait<STAGES - 2>();
      block_sync();  // the tile has arrived for all; the stage of tile i - 1 is free
      if (i + STAGES - 1 < tiles) load_tile(tile + (STAGES - 1) * TILE, (i + STAGES - 1) % STAGES, upcoming);
      copy_async_commit();
      upcoming = slot_of(tile + STAGES * TILE);
      if (i == tiles - 1 && has_newest) {
        patch_newest(tile, stage);
        block_sync();
      }
      scores(stage, fragments);
      block_sync();
      softmax(tile, s.m, s.l);
      block_sync();
      values(stage, s.o);
    }
  }

  // The place of a thread's sums o[i][n][c]: head within the block, element of the value.
  static DEVICE int head_of(int n, int c) { return n * 8 + threadIdx.x % 4 * 2 + c % 2; }
  static DEVICE int value_of(int i, int c) {
    return (threadIdx.x / 32 * V_TILES + i) * 16 + threadIdx.x % 32 / 4 + c / 2 * 8;
  }
};
