// One block of decode attention over keys and values: one token, up to 8 * NT query heads of one KV head, some neighbouring
// splits of its slots, each begun anew.
//
// Every warp has a quarter of each tile's slots for itself, from the copy to its own softmax: tiles need no barrier, and
// warps meet when queries are made, and to merge a split. Scores are computed transposed (slots x heads), so that a
// group of 8 heads fills the matrix unit's 8 columns; transposed once more in registers, probabilities are the operand
// that values take. Tiles come through shared memory, STAGES of them at a time. Slots of earlier steps do not depend on the kernel
// before, so their loads start before the wait for it. Then the block norms and rotates its queries; the warp whose slots
// hold the newest makes that one from the projections, writes it to the cache and puts it into its tile.
#pragma once
#include "attention.cuh"

// READY: queries and all slots are there; else the block makes its own of the projections, by lanes.
// NOTE: most of this runs once a launch, and then its instructions come from memory: what is not needed costs time.
template <int D, int NT, int STAGES, bool READY>
struct HeadsAttention {
  static constexpr int WARPS = 4, THREADS = WARPS * 32, TILE = 64, OWN = TILE / WARPS;
  static constexpr int COLS = NT * 8, HEADS = COLS / WARPS;  // queries a warp makes
  static constexpr int ROW = D * 2 + 16;                     // bytes; 16 of padding against bank conflicts
  static constexpr int STAGE = 2 * TILE * ROW;               // keys, then values
  static constexpr int STEPS = D / 16, LANE = D / 32;        // LANE: elements of a vector a lane holds
  static constexpr int OFF_Q = STAGES * STAGE, OFF_ML = OFF_Q + COLS * ROW;
  static constexpr int SMEM = OFF_ML + WARPS * COLS * 8;
  static constexpr int MERGE_ROW = D + 4;                    // floats of a head while warps merge, in place of a tile
  static constexpr bool IS_READY = READY, TAKES_MAP = false;
  static_assert(WARPS * COLS * MERGE_ROW * 4 <= STAGE && SMEM <= 227 * 1024, "shared memory");

  // What a lane keeps of its warp's slots, for heads 2 (lane % 4) + c of every group of 8: maximum (log2 domain), this lane's
  // part of the sum, and values as the matrix unit leaves them.
  struct Sums {
    float m[NT][2], l[NT][2];
    float o[STEPS][NT][4];
  };

  const AttentionParams& p;
  u8* smem;
  i64 token, table_row;
  int kv_head, head0, heads_here, begin, end, tiles, window_begin;
  int split, per_split, used;  // the first of its splits, tiles of each, and how many of all splits hold slots
  bool has_newest;  // the range's last slot is the token's own
  bool is_writer;   // ... and this block writes it to the cache
  u8* own_slot;     // ... here

  // Block `part` of those that share splits of a token: each KV head's query heads in groups. block: of `blocks`.
  static DEVICE HeadsAttention at(const AttentionParams& p, int block, int blocks, int part, i64 token) {
    const int group = p.heads / p.kv_heads, groups_per_kv = ceil_div(group, COLS);
    const int kv_head = part / groups_per_kv, head0 = kv_head * group + part % groups_per_kv * COLS;
    const int length = p.lengths[token];
    const Splits splits = Splits::of(p, length, TILE);
    const int split = splits.share(block, blocks), begin = splits.begin(split);
    const int end = splits.begin(splits.share(block + 1, blocks)), tiles = ceil_div(end - begin, TILE);
    const bool has_newest = !READY && tiles > 0 && end == length;
    const i64 table_row = p.table_rows != nullptr ? p.table_rows[token] : token;
    return HeadsAttention{p, dynamic_smem(), token, table_row, kv_head, head0, min_int((kv_head + 1) * group - head0, COLS),
                          begin, end, tiles, p.window > 0 ? max_int(length - p.window, 0) : 0,
                          split, splits.per_split, splits.used, has_newest, part % groups_per_kv == 0,
                          has_newest ? slot_address(p.cache, table_row, end - 1) : nullptr};
  }

  DEVICE int first_own() const { return static_cast<int>(threadIdx.x) / 32 * OWN; }
  DEVICE u8* key_row(int stage, int slot) const { return smem + stage * STAGE + slot * ROW; }
  DEVICE u8* value_row(int stage, int slot) const { return key_row(stage, TILE + slot); }
  DEVICE u16* query(int h) const { return reinterpret_cast<u16*>(smem + OFF_Q + h * ROW); }

  // Where one of this warp's slots of a tile lies: a lane computes one, the table's entry is on its way early.
  DEVICE u64 slot_of(int tile) const {
    const int slot = min_int(tile + first_own() + static_cast<int>(threadIdx.x) % OWN, end - 1);
    return reinterpret_cast<u64>(slot_address(p.cache, table_row, slot));
  }
  // Start loading this warp's slots of the tile that begins at `tile`; `mine`: its `slot_of`.
  DEVICE void load_tile(int tile, int stage, u64 mine) const {
    const int lane = threadIdx.x % 32, last = has_newest ? end - 1 : end;
    const i64 key = kv_head * p.key_head_bytes, value = p.value_offset_bytes + kv_head * p.value_head_bytes;
#pragma unroll 4
    for (int r = 0; r < OWN; ++r) {
      const u8* slot = reinterpret_cast<const u8*>(shfl(mine, r));
      const int at = first_own() + r;
#pragma unroll
      for (int i = 0; i < D / 4; i += 32) {  // pieces of 16 bytes: the key's, then the value's
        const int c = i + lane;
        if (D / 4 % 32 != 0 && c >= D / 4) continue;
        const bool is_key = c < D / 8;
        copy_async16((is_key ? key_row(stage, at) : value_row(stage, at)) + (is_key ? c : c - D / 8) * 16,
                     slot + (is_key ? key : value) + (is_key ? c : c - D / 8) * 16, tile + at < last);
      }
    }
  }

  // Queries of this block's heads, normed and rotated, to shared memory; in place of heads that are not there, the last one
  // again, which nobody takes: a warp's heads go side by side, and loads of all are issued before the first is used.
  DEVICE void prepare_queries() const {
    const int warp = threadIdx.x / 32;
    if constexpr (READY) {
      for (int i = threadIdx.x; i < COLS * (D / 8); i += THREADS)
        reinterpret_cast<uint4*>(query(i / (D / 8)))[i % (D / 8)] =
            load16(p.q + (token * p.heads + head0 + min_int(i / (D / 8), heads_here - 1)) * D + i % (D / 8) * 8);
      return;
    } else {
      const LaneTurn<LANE> turn(p.gqa.rope, token);
      LanePart<LANE> parts[HEADS], weight{};
      if (p.gqa.q_norm != nullptr) weight.load(p.gqa.q_norm);
#pragma unroll
      for (int n = 0; n < HEADS; ++n)
        parts[n].load(p.gqa.vector(token, head0 + min_int(warp + n * WARPS, heads_here - 1)));
      float x[HEADS][LANE];
#pragma unroll
      for (int n = 0; n < HEADS; ++n) parts[n].unpack(x[n]);
      if (p.gqa.q_norm != nullptr)
#pragma unroll
        for (int n = 0; n < HEADS; ++n) norm_part(x[n], weight, p.gqa.eps);
#pragma unroll
      for (int n = 0; n < HEADS; ++n) turn.turn(x[n]);
#pragma unroll
      for (int n = 0; n < HEADS; ++n) LanePart<LANE>::store(query(warp + n * WARPS), x[n]);
    }
  }

  // What the warp that makes the token's own slot needs: loaded with the queries, used when its tile is there.
  struct Newest {
    LanePart<LANE> key, value, weight;
  };
  DEVICE bool makes_newest() const {
    return has_newest && (end - 1 - begin) % TILE / OWN == static_cast<int>(threadIdx.x) / 32;
  }
  DEVICE void load_newest(Newest& n) const {
    n.key.load(p.gqa.vector(token, p.heads + kv_head));
    n.value.load(p.gqa.vector(token, p.heads + p.kv_heads + kv_head));
    if (p.gqa.k_norm != nullptr) n.weight.load(p.gqa.k_norm);
  }
  // The slot into the last tile, around which copies have arrived; and by one block a KV head to the cache.
  DEVICE void put_newest(const Newest& n, int tile, int stage) const {
    const LaneTurn<LANE> turn(p.gqa.rope, token);
    float x[LANE], v[LANE];
    n.key.unpack(x);
    n.value.unpack(v);
    if (p.gqa.k_norm != nullptr) norm_part(x, n.weight, p.gqa.eps);
    turn.turn(x);
    LanePart<LANE>::store(reinterpret_cast<u16*>(key_row(stage, end - 1 - tile)), x);
    LanePart<LANE>::store(reinterpret_cast<u16*>(value_row(stage, end - 1 - tile)), v);
    if (!is_writer) return;
    LanePart<LANE>::store(reinterpret_cast<u16*>(own_slot + kv_head * p.key_head_bytes), x);
    LanePart<LANE>::store(reinterpret_cast<u16*>(own_slot + p.value_offset_bytes + kv_head * p.value_head_bytes), v);
  }

  // All queries as the matrix unit takes them; they serve every tile.
  DEVICE void load_fragments(u32 (&b)[STEPS][NT][2]) const {
    const int lane = threadIdx.x % 32;
    const u8* row = smem + OFF_Q + lane % 8 * ROW + lane / 8 * 16;
#pragma unroll
    for (int step = 0; step < STEPS; step += 2)  // one x4 load covers two steps for 8 heads
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        u32 r[4];
        ldmatrix_x4(r, row + n * 8 * ROW + step * 32);
        b[step][n][0] = r[0], b[step][n][1] = r[1];
        b[step + 1][n][0] = r[2], b[step + 1][n][1] = r[3];
      }
  }

  // Scores of this warp's 16 slots. Lane l: slots l / 4 and 8 more (c / 2), heads 2 (l % 4) + c % 2.
  DEVICE void scores(int stage, const u32 (&b)[STEPS][NT][2], float (&s)[NT][4]) const {
    const int lane = threadIdx.x % 32;
    const u8* row = key_row(stage, first_own() + lane % 16) + lane / 16 * 16;
    float acc[2][NT][4];  // even and odd steps: two shorter chains
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) acc[0][n][c] = acc[1][n][c] = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      u32 a[4];
      ldmatrix_x4(a, row + step * 32);
#pragma unroll
      for (int n = 0; n < NT; ++n) mma_bf16(acc[step % 2][n], a[0], a[1], a[2], a[3], b[step][n][0], b[step][n][1]);
    }
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) s[n][c] = acc[0][n][c] + acc[1][n][c];
  }

  // Running softmax: scores to probabilities in place, as pairs of heads; what was summed shrinks.
  DEVICE void softmax(int tile, float (&s)[NT][4], u32 (&pairs)[NT][2], Sums& sums) const {
    const int slot = tile + first_own() + static_cast<int>(threadIdx.x) % 32 / 4;
    const bool first = slot < end && slot >= window_begin, second = slot + 8 < end && slot + 8 >= window_begin;
    float top[NT][2];
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        s[n][c] = first ? s[n][c] * p.scale_log2 : NEG_INF;
        s[n][c + 2] = second ? s[n][c + 2] * p.scale_log2 : NEG_INF;
        top[n][c] = fmaxf(s[n][c], s[n][c + 2]);
      }
#pragma unroll
    for (int mask = 16; mask >= 4; mask >>= 1)
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) top[n][c] = fmaxf(top[n][c], shfl_xor(top[n][c], mask));
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      float shrink[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float next = fmaxf(sums.m[n][c], top[n][c]);
        const float base = next == NEG_INF ? 0.0f : next;  // no slot yet
        shrink[c] = exp2_fast(sums.m[n][c] - base);
        sums.m[n][c] = next;
        s[n][c] = exp2_fast(s[n][c] - base);
        s[n][c + 2] = exp2_fast(s[n][c + 2] - base);
        sums.l[n][c] = sums.l[n][c] * shrink[c] + (s[n][c] + s[n][c + 2]);
      }
      pairs[n][0] = pack_bf16(s[n][0], s[n][1]);
      pairs[n][1] = pack_bf16(s[n][2], s[n][3]);
#pragma unroll
      for (int i = 0; i < STEPS; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums.o[i][n][c] *= shrink[c % 2];
    }
  }

  // o (D x heads) += v^T (D x 16 slots) * probabilities (16 slots x heads).
  DEVICE void values(int stage, const u32 (&pairs)[NT][2], Sums& sums) const {
    const int lane = threadIdx.x % 32;
    u32 b[NT][2];
#pragma unroll
    for (int n = 0; n < NT; ++n) b[n][0] = transpose_8x8(pairs[n][0]), b[n][1] = transpose_8x8(pairs[n][1]);
    // Matrices 0..3: slots 0-7 rows d 0-7, slots 0-7 rows d 8-15, slots 8-15 rows d 0-7, slots 8-15 rows d 8-15.
    const u8* at = value_row(stage, first_own() + lane % 8 + lane / 16 * 8) + lane / 8 % 2 * 16;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      u32 a[4];
      ldmatrix_x4_trans(a, at + i * 32);
#pragma unroll
      for (int n = 0; n < NT; ++n) mma_bf16(sums.o[i][n], a[0], a[1], a[2], a[3], b[n][0], b[n][1]);
    }
  }

  // Put the first tiles on their way; returns where the one behind them lies, for `finish`.
  DEVICE u64 start() const {
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) {
      if (i < tiles) load_tile(begin + i * TILE, i, slot_of(begin + i * TILE));
      copy_async_commit();
    }
    return tiles > STAGES ? slot_of(begin + STAGES * TILE) : 0;
  }

  static DEVICE void clear(Sums& sums) {
#pragma unroll
    for (int n = 0; n < NT; ++n) sums.m[n][0] = sums.m[n][1] = NEG_INF, sums.l[n][0] = sums.l[n][1] = 0.0f;
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
#pragma unroll
      for (int n = 0; n < NT; ++n) sums.o[i][n][0] = sums.o[i][n][1] = sums.o[i][n][2] = sums.o[i][n][3] = 0.0f;
  }

  // All tiles of the block, once queries and newest slot can be made; every split's partial attention for the merge.
  DEVICE void finish(u64 upcoming) const {
    Newest newest{};
    if (!READY && makes_newest()) load_newest(newest);
    if (tiles > 0) prepare_queries();
    if constexpr (READY) leave_empty();
    Sums sums;
    clear(sums);
    int number = split, left = per_split;  // of the present split, and tiles of it still to come
    block_sync();  // the queries are there
    u32 fragments[STEPS][NT][2];
    if (tiles > 0) load_fragments(fragments);
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      const int tile = begin + i * TILE, stage = i % STAGES;
      copy_async_wait<STAGES - 1>();
      warp_sync();  // this warp's slots have arrived
      if (!READY && i == tiles - 1 && makes_newest()) {
        put_newest(newest, tile, stage);
        warp_sync();
      }
      float s[NT][4];
      u32 pairs[NT][2];
      scores(stage, fragments, s);
      softmax(tile, s, pairs, sums);
      values(stage, pairs, sums);
      if (--left == 0 || i == tiles - 1) {
        write(number, stage, sums);
        if (i == tiles - 1) break;
        clear(sums);
        ++number, left = per_split;
        block_sync();
      }
      warp_sync();  // the stage is free for the next copies
      if (i + STAGES < tiles) load_tile(tile + STAGES * TILE, stage, upcoming);
      copy_async_commit();
      if (i + STAGES + 1 < tiles) upcoming = slot_of(tile + (STAGES + 1) * TILE);
    }
  }

  // A block without slots, of which the first stays: it waits for the kernel before, so that this one ends behind it.
  DEVICE bool is_idle() const { return tiles == 0 && blockIdx.y > 0; }
  // Splits without slots: blocks that stay tell of them, to those who merge without knowing which splits hold slots.
  DEVICE void leave_empty() const {
    const int step = max_int(min_int(used, gridDim.y), 1);
    for (int empty = used + blockIdx.y; empty < p.splits; empty += step) {
      if (static_cast<int>(threadIdx.x) >= heads_here) continue;
      float* ml = p.partial_ml + ((token * p.splits + empty) * p.heads + head0 + threadIdx.x) * 2;
      ml[0] = NEG_INF, ml[1] = 0.0f;
    }
  }

  // A split's partial attention, for the merge: that of all warps, which meet where its last tile was.
  DEVICE void write(int number, int stage, Sums& sums) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* ml = reinterpret_cast<float*>(smem + OFF_ML);              // (WARPS, COLS, 2)
    float* merge = reinterpret_cast<float*>(smem + stage * STAGE);    // (WARPS, COLS, MERGE_ROW)
    const i64 part = (token * p.splits + number) * p.heads + head0;
#pragma unroll
    for (int mask = 16; mask >= 4; mask >>= 1)
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) sums.l[n][c] += shfl_xor(sums.l[n][c], mask);
    block_sync();  // no warp reads the tile any more
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int h = n * 8 + lane % 4 * 2 + c;
        if (lane < 4) ml[(warp * COLS + h) * 2] = sums.m[n][c], ml[(warp * COLS + h) * 2 + 1] = sums.l[n][c];
        float* row = merge + (warp * COLS + h) * MERGE_ROW + lane / 4;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) row[i * 16] = sums.o[i][n][c], row[i * 16 + 8] = sums.o[i][n][c + 2];
      }
    block_sync();
    for (int i = threadIdx.x; i < heads_here * (D / 4); i += THREADS) {
      const int h = i / (D / 4), d = i % (D / 4) * 4;
      float m = NEG_INF, l = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) m = fmaxf(m, ml[(w * COLS + h) * 2]);
      const float base = m == NEG_INF ? 0.0f : m;  // no slot within the window
      float4 o = float4{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float share = exp2_fast(ml[(w * COLS + h) * 2] - base);
        const float4 v = load_float4(merge + (w * COLS + h) * MERGE_ROW + d);
        l += share * ml[(w * COLS + h) * 2 + 1];
        o.x += share * v.x, o.y += share * v.y, o.z += share * v.z, o.w += share * v.w;
      }
      *reinterpret_cast<float4*>(p.partial_o + (part + h) * D + d) = o;
      if (d == 0) p.partial_ml[(part + h) * 2] = m, p.partial_ml[(part + h) * 2 + 1] = l;
    }
  }
};
