// One block of decode attention over latents (MLA): one token, up to 8 * NT query heads, some neighbouring splits of its
// slots, each begun anew.
//
// Scores are computed transposed (slots x heads): a group of 8 heads fills the matrix unit's 8 columns. Tiles of slots
// come through shared memory, STAGES - 1 ahead. Slots of earlier steps do not depend on the kernel before, so their
// loads start before the wait for it. Then each block norms and rotates its own queries; the block whose range holds
// the newest slot makes that slot from the projections, writes it to the cache and patches it into its tile.
#pragma once
#include "attention.cuh"
#include "warpgroup.cuh"

// KD, VD: elements of a cache row and of the latent it begins with, which is key and value. READY: queries and all slots are
// there; else a block makes its own of the projections, by lanes. WIDE: products of warpgroups, whose operands stay in
// shared memory, cut into panels.
// NOTE: most of this runs once a launch, and then its instructions come from memory: what is not needed costs time.
template <int KD, int VD, int NT, int TILE, int STAGES, int WARPS, bool READY, bool WIDE = false>
struct LatentsAttention {
  static constexpr int THREADS = WARPS * 32;
  static constexpr int COLS = NT * 8;
  static constexpr int K_ROW = KD * 2 + (WIDE ? 0 : 16);     // bytes; 16 of padding against bank conflicts
  static constexpr int STAGE = TILE * K_ROW;
  static constexpr int GROUP = KD / PANEL_ELEMENTS * PANEL_GROUP;  // WIDE: bytes of eight slots, panel after panel
  static constexpr int P_ROW = TILE * 2 + (WIDE ? 0 : 16);
  static constexpr int S_STRIDE = TILE + 4;                  // floats
  static constexpr int GROUPS = TILE / 16, K_PARTS = WARPS / GROUPS;
  static constexpr int K_STEPS = KD / 16 / K_PARTS, K_PAIRS = (K_STEPS + 1) / 2;
  static constexpr int V_TILES = VD / 16 / WARPS;            // WIDE: of 64 values by four warps; else of 16 by one
  static constexpr int S_BYTES = K_PARTS * COLS * S_STRIDE * 4, P_BYTES = COLS * P_ROW;
  static constexpr int WORK_BYTES = S_BYTES + P_BYTES;
  static constexpr int OFF_Q = STAGES * STAGE;
  static constexpr int OFF_WORK = OFF_Q + COLS * K_ROW;
  static constexpr int OFF_P = WIDE ? OFF_WORK : OFF_WORK + S_BYTES;  // panels begin at multiples of 1,024
  static constexpr int OFF_S = WIDE ? OFF_WORK + P_BYTES : OFF_WORK;
  static constexpr int OFF_ALPHA = OFF_WORK + WORK_BYTES;
  static constexpr int OFF_NEWEST = OFF_ALPHA + COLS * 4;
  static constexpr int NEWEST = KD * 2;
  static constexpr int OFF_ARRIVALS = OFF_NEWEST + NEWEST;   // WIDE: a barrier a stage
  static constexpr int SMEM = OFF_ARRIVALS + (WIDE ? STAGES * 8 : 0);
  static constexpr bool IS_READY = READY, TAKES_MAP = true;
  static_assert(GROUPS * K_PARTS == WARPS && K_STEPS * K_PARTS * 16 == KD && V_TILES * WARPS * 16 == VD, "shape");
  static_assert(!WIDE || (TILE == 64 && WARPS == 8 && OFF_Q % 1024 == 0 && OFF_P % 1024 == 0), "panels");
  static_assert(STAGE % 16 == 0 && OFF_P % 16 == 0 && OFF_NEWEST % 16 == 0 && SMEM <= 227 * 1024, "shared memory");

  // What one thread keeps of all tiles.
  struct Sums {
    float m[COLS / WARPS], l[COLS / WARPS];  // of heads warp, warp + WARPS, ...: maximum (log2 domain), and a lane's part of the sum
    float o[V_TILES][NT][4];                 // value_dim x heads, as the matrix unit leaves them
  };

  const AttentionParams& p;
  u8* smem;
  i64 token, table_row;
  int head0, heads_here, begin, end, tiles;
  int split, per_split, used;  // the first of its splits, tiles of each, and how many of all splits hold slots
  bool has_newest;  // the range's last slot is the token's own
  bool is_writer;   // ... and this block writes it to the cache
  u8* own_slot;     // ... here
  const PanelMap* map;   // WIDE: whole tiles come by the copy engine; null: by all threads

  // Block `part` of those that share splits of a token: the query heads in groups. block: of `blocks`.
  static DEVICE LatentsAttention at(const AttentionParams& p, int block, int blocks, int part, i64 token) {
    const int head0 = part * COLS, length = p.lengths[token];
    const Splits splits = Splits::of(p, length, TILE);
    const int split = splits.share(block, blocks), begin = splits.begin(split);
    const int end = splits.begin(splits.share(block + 1, blocks)), tiles = ceil_div(end - begin, TILE);
    const bool has_newest = !READY && tiles > 0 && end == length;
    const i64 table_row = p.table_rows != nullptr ? p.table_rows[token] : token;
    return LatentsAttention{p, dynamic_smem(), token, table_row, head0, min_int(p.heads - head0, COLS), begin, end, tiles,
                            split, splits.per_split, splits.used, has_newest, part == 0,
                            has_newest ? slot_address(p.cache, table_row, end - 1) : nullptr, nullptr};
  }

  // Where 16 bytes of a tile's slot, of a query and of a head's probabilities lie.
  DEVICE u8* slot_piece(int stage, int slot, int piece) const {
    u8* rows = smem + stage * STAGE;
    if (WIDE) return rows + slot / 8 * GROUP + piece / 8 * PANEL_GROUP + panel_piece(slot % 8, piece % 8);
    return rows + slot * K_ROW + piece * 16;
  }
  DEVICE u8* query_piece(int h, int piece) const {
    u8* rows = smem + OFF_Q;
    return WIDE ? rows + piece / 8 * (COLS * PANEL_ROW) + panel_piece(h, piece % 8) : rows + h * K_ROW + piece * 16;
  }
  DEVICE u16* probability(int h, int slot) const {
    u8* rows = smem + OFF_P;
    u8* piece = WIDE ? rows + panel_piece(h, slot / 8) : rows + h * P_ROW + slot / 8 * 16;
    return reinterpret_cast<u16*>(piece) + slot % 8;
  }
  // What ordinary stores wrote is there for warpgroup products; before a block_sync.
  static DEVICE void publish() {
    if (WIDE) bulk_fence();
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
#pragma unroll 4
    for (int r = 0; r < PER_WARP; ++r) {
      const u8* slot = reinterpret_cast<const u8*>(shfl(mine, r));
      const int at = warp * PER_WARP + r;
      const bool valid = tile + at < (has_newest ? end - 1 : end);
      for (int c = lane; c < KD / 8; c += 32) copy_async16(slot_piece(stage, at, c), slot + c * 16, valid);
    }
  }

  static constexpr int HEADS = COLS / WARPS;  // queries a warp makes
  static constexpr int ROPE_LANE = (KD - VD) / 32;  // elements of a rope part a lane holds
  static_assert(ROPE_LANE == 2, "a lane's pair");

  // Queries of this block's heads, normed and rotated, to shared memory; in place of heads that are not there, the last one
  // again, which nobody takes: a warp's heads go side by side, and loads of all are issued before the first is used.
  DEVICE void prepare_queries() const {
    if constexpr (READY) {
      for (int i = threadIdx.x; i < COLS * (KD / 8); i += THREADS)
        *reinterpret_cast<uint4*>(query_piece(i / (KD / 8), i % (KD / 8))) =
            load16(p.q + (token * p.heads + head0 + min_int(i / (KD / 8), heads_here - 1)) * KD + i % (KD / 8) * 8);
    } else {
      make_queries();
    }
  }

  DEVICE void make_queries() const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const LaneTurn<ROPE_LANE> turn(p.mla.rope, token);
    LanePart<ROPE_LANE> parts[HEADS];
    uint4 latents[HEADS][VD / 256];
#pragma unroll
    for (int n = 0; n < HEADS; ++n) {
      const int h = min_int(warp + n * WARPS, heads_here - 1);
      parts[n].load(p.mla.rope_part(token, head0 + h));
#pragma unroll
      for (int i = 0; i < VD / 256; ++i)
        latents[n][i] = load16(p.mla.q_latent + (token * p.heads + head0 + h) * VD + (i * 32 + lane) * 8);
    }
#pragma unroll
    for (int n = 0; n < HEADS; ++n) {
      const int h = warp + n * WARPS;
#pragma unroll
      for (int i = 0; i < VD / 256; ++i) *reinterpret_cast<uint4*>(query_piece(h, i * 32 + lane)) = latents[n][i];
      float x[ROPE_LANE];
      parts[n].unpack(x);
      turn.turn(x);
      *reinterpret_cast<u32*>(query_piece(h, VD / 8 + lane / 4) + lane % 4 * 4) = pack_bf16(x[0], x[1]);
    }
  }

  // The token's own slot from the projections, the latent by warp 0 and the rope key by warp 1: loaded with the queries,
  // then to shared memory, and by one block to the cache.
  struct Newest {
    LanePart<VD / 32> latent, weight;
    LanePart<ROPE_LANE> rope;
  };
  DEVICE void load_newest(Newest& n) const {
    const int warp = threadIdx.x / 32;
    if (warp == 0) {
      n.latent.load(p.mla.kv_a + token * p.mla.kv_a_stride);
      n.weight.load(p.mla.kv_a_norm);
    } else if (warp == 1) {
      n.rope.load(p.mla.rope_part(token, p.heads));
    }
  }
  DEVICE void prepare_newest(const Newest& n) const {
    const int warp = threadIdx.x / 32;
    u16* newest = reinterpret_cast<u16*>(smem + OFF_NEWEST);
    u16* slot = reinterpret_cast<u16*>(own_slot);
    if (warp == 0) {
      float x[VD / 32];
      n.latent.unpack(x);
      norm_part(x, n.weight, p.mla.eps);
      LanePart<VD / 32>::store(newest, x);
      if (is_writer) LanePart<VD / 32>::store(slot, x);
    } else if (warp == 1) {
      const LaneTurn<ROPE_LANE> turn(p.mla.rope, token);
      float x[ROPE_LANE];
      n.rope.unpack(x);
      turn.turn(x);
      LanePart<ROPE_LANE>::store(newest + VD, x);
      if (is_writer) LanePart<ROPE_LANE>::store(slot + VD, x);
    }
  }

  // Into its tile, once the copies around it have arrived.
  DEVICE void patch_newest(int tile, int stage) const {
    for (int c = threadIdx.x; c < NEWEST / 16; c += THREADS)
      *reinterpret_cast<uint4*>(slot_piece(stage, end - 1 - tile, c)) =
          *reinterpret_cast<const uint4*>(smem + OFF_NEWEST + c * 16);
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
    const int part = shfl(static_cast<int>(threadIdx.x) / 32 / GROUPS, 0);  // a warp's one: the compiler may know
    float acc[2][NT][4];  // even and odd steps: two shorter chains
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) acc[0][n][c] = acc[1][n][c] = 0.0f;
    if constexpr (WIDE) {
      // A warpgroup takes half of every panel.
      const PanelOperand keys = panel_operand(smem + stage * STAGE + part * 64, GROUP);
      const PanelOperand q = panel_operand(smem + OFF_Q + part * 64, PANEL_GROUP);
      warpgroup_begin(acc[0]);
#pragma unroll
      for (int step = 0; step < K_STEPS; ++step)
        warpgroup_mma<COLS, false>(acc[0], operand_at(keys, step / 2 * PANEL_GROUP + step % 2 * 32),
                                   operand_at(q, step / 2 * (COLS * PANEL_ROW) + step % 2 * 32), step > 0);
      warpgroup_end(acc[0]);
    } else {
      multiply_keys(stage, b, acc);
    }
    leave_scores(acc);
  }
  DEVICE void multiply_keys(int stage, const u32 (&b)[2 * K_PAIRS][NT][2], float (&acc)[2][NT][4]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp % GROUPS, part = warp / GROUPS;
    const u8* row = smem + stage * STAGE + (group * 16 + lane % 16) * K_ROW + (part * K_STEPS * 16 + lane / 16 * 8) * 2;
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
      u32 a[4];
      ldmatrix_x4(a, row + step * 32);
#pragma unroll
      for (int n = 0; n < NT; ++n) mma_bf16(acc[step % 2][n], a[0], a[1], a[2], a[3], b[step][n][0], b[step][n][1]);
    }
  }
  DEVICE void leave_scores(const float (&acc)[2][NT][4]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp % GROUPS, part = warp / GROUPS;
    float* s = reinterpret_cast<float*>(smem + OFF_S) + part * COLS * S_STRIDE;
    const int g = lane / 4, q = lane % 4, slot = group * 16 + g;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        s[(n * 8 + 2 * q + c % 2) * S_STRIDE + slot + c / 2 * 8] = acc[0][n][c] + acc[1][n][c];
  }

  // Running softmax; a warp owns heads warp, warp + WARPS, ... and keeps their maximum and sum in registers, the sum by
  // lanes. Its heads go side by side, so that their shuffles overlap.
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
        v[j][i] = tile + slot < end ? x * p.scale_log2 : NEG_INF;
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
      shrink[j] = exp2_fast(m[j] - next);
      m[j] = next;
      sum[j] = 0.0f;
#pragma unroll
      for (int i = 0; i < TILE / 32; ++i) {
        const float e = exp2_fast(v[j][i] - next);
        sum[j] += e;
        *probability(warp + j * WARPS, lane + i * 32) = bf16_bits(e);
      }
      if (lane == 0) alpha[warp + j * WARPS] = shrink[j];
      l[j] = l[j] * shrink[j] + sum[j];
    }
  }

  // o (value_dim x heads) = o * alpha + v^T p; a warp owns VD / 4 rows.
  DEVICE void values(int stage, float (&o)[V_TILES][NT][4]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q = lane % 4;
    const float* alpha = reinterpret_cast<const float*>(smem + OFF_ALPHA);
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
    if constexpr (WIDE) {
      const PanelOperand slots = panel_operand(smem + stage * STAGE + shfl(warp / 4, 0) * V_TILES * PANEL_GROUP, GROUP);
      const PanelOperand shares = panel_operand(smem + OFF_P, PANEL_GROUP);
#pragma unroll
      for (int i = 0; i < V_TILES; ++i) warpgroup_begin(o[i]);
#pragma unroll
      for (int i = 0; i < V_TILES; ++i)
#pragma unroll
        for (int step = 0; step < TILE / 16; ++step)
          warpgroup_mma<COLS, true>(o[i], operand_at(slots, i * PANEL_GROUP + step * 2 * GROUP),
                                    operand_at(shares, step * 32), true);
#pragma unroll
      for (int i = 0; i < V_TILES; ++i) warpgroup_end(o[i]);
    } else {
      multiply_values(smem + stage * STAGE, o);
    }
  }
  DEVICE void multiply_values(const u8* v, float (&o)[V_TILES][NT][4]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < TILE / 32; ++step) {  // 32 slots: two products
      u32 b[NT][4];
#pragma unroll
      for (int n = 0; n < NT; ++n)
        ldmatrix_x4(b[n], smem + OFF_P + (n * 8 + lane % 8) * P_ROW + step * 64 + lane / 8 * 16);
#pragma unroll
      for (int i = 0; i < V_TILES; ++i) {
        // Matrices 0..3: slots 0-7 rows d 0-7, slots 0-7 rows d 8-15, slots 8-15 rows d 0-7, slots 8-15 rows d 8-15.
        const u8* at = v + (step * 32 + lane % 8 + lane / 16 * 8) * K_ROW + ((warp * V_TILES + i) * 16 + lane / 8 % 2 * 8) * 2;
        u32 a0[4], a1[4];
        ldmatrix_x4_trans(a0, at);
        ldmatrix_x4_trans(a1, at + 16 * K_ROW);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          mma_bf16(o[i][n], a0[0], a0[1], a0[2], a0[3], b[n][0], b[n][1]);
          mma_bf16(o[i][n], a1[0], a1[1], a1[2], a1[3], b[n][2], b[n][3]);
        }
      }
    }
  }

  // Put the first tiles on their way; returns where the one behind them lies, for `finish`.
  DEVICE u64 start() const {
    if (WIDE && map != nullptr) {
      if (threadIdx.x == 0)
        for (int i = 0; i < STAGES; ++i) arrival(i).create();
      warp_sync();  // for the threads beside it that bring slots
    }
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) {
      if (i < tiles) start_tile(begin + i * TILE, i, place_of(begin + i * TILE));
      copy_async_commit();
    }
    return tiles > STAGES - 1 ? place_of(begin + (STAGES - 1) * TILE) : 0;
  }
  DEVICE BulkArrival arrival(int stage) const { return BulkArrival{reinterpret_cast<u64*>(smem + OFF_ARRIVALS) + stage}; }
  // Tiles of which every slot was written before this launch; behind them comes one more at most.
  DEVICE bool is_whole(int tile) const { return WIDE && map != nullptr && tile + TILE <= (has_newest ? end - 1 : end); }
  // The first of the eight slots of a tile that this thread brings, if it is one of the first TILE / 8.
  static DEVICE int first_of_eight(int tile) { return tile + static_cast<int>(threadIdx.x) % (TILE / 8) * 8; }
  // What `start_tile` needs of the frame table: on its way a tile early. The frame of those eight, or `slot_of` of each thread.
  DEVICE u64 place_of(int tile) const {
    if (!is_whole(tile)) return slot_of(tile);
    return p.cache.frame_table[table_row * p.cache.table_row_stride +
                               static_cast<i64>(first_of_eight(tile) / p.cache.page_tokens) * p.cache.table_page_stride];
  }
  DEVICE void start_tile(int tile, int stage, u64 place) const {
    if (!is_whole(tile)) return load_tile(tile, stage, place);
    if (threadIdx.x >= TILE / 8) return;
    if (threadIdx.x == 0) arrival(stage).expect(STAGE);
    copy_panels(*map, smem + stage * STAGE + threadIdx.x * GROUP, first_of_eight(tile) % p.cache.page_tokens,
                static_cast<int>(place), arrival(stage));
  }

  static DEVICE void clear(Sums& s) {
#pragma unroll
    for (int j = 0; j < COLS / WARPS; ++j) s.m[j] = NEG_INF, s.l[j] = 0.0f;
#pragma unroll
    for (int i = 0; i < V_TILES; ++i)
#pragma unroll
      for (int n = 0; n < NT; ++n) s.o[i][n][0] = s.o[i][n][1] = s.o[i][n][2] = s.o[i][n][3] = 0.0f;
  }

  // All tiles of the block, once queries and newest slot can be made; every split's partial attention for the merge.
  DEVICE void finish(u64 upcoming) const {
    Newest newest{};
    if (!READY && has_newest) load_newest(newest);
    if (tiles > 0) prepare_queries();
    if (!READY && has_newest) prepare_newest(newest);
    if constexpr (READY) leave_empty();
    Sums s;
    clear(s);
    int at = split, left = per_split;  // of the present split: its number, and tiles still to come

    u32 fragments[2 * K_PAIRS][NT][2];
    publish();
    block_sync();  // the queries are there
    if (!WIDE && tiles > 0) load_fragments(fragments);
    for (int i = 0; i < tiles; ++i) {
      const int tile = begin + i * TILE, stage = i % STAGES;
      if (is_whole(tile)) arrival(stage).wait(i / STAGES);
      else copy_async_wait<STAGES - 2>();
      publish();
      block_sync();  // the tile has arrived for all; the stage of tile i - 1 is free
      if (i + STAGES - 1 < tiles) start_tile(tile + (STAGES - 1) * TILE, (i + STAGES - 1) % STAGES, upcoming);
      copy_async_commit();
      if (i + STAGES < tiles) upcoming = place_of(tile + STAGES * TILE);
      if (!READY && i == tiles - 1 && has_newest) {
        patch_newest(tile, stage);
        publish();
        block_sync();
      }
      scores(stage, fragments);
      block_sync();
      softmax(tile, s.m, s.l);
      publish();
      block_sync();
      values(stage, s.o);
      if (--left > 0 && i < tiles - 1) continue;
      write(at, s);
      if (i == tiles - 1) break;
      clear(s);
      ++at, left = per_split;
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

  // A split's partial attention, for the merge.
  DEVICE void write(int at, const Sums& s) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 part = (token * p.splits + at) * p.heads + head0;
#pragma unroll
    for (int j = 0; j < HEADS; ++j) {
      const int h = warp + j * WARPS;
      const float sum = warp_sum(s.l[j]);
      if (h < heads_here && lane == 0) {
        p.partial_ml[(part + h) * 2] = s.m[j];
        p.partial_ml[(part + h) * 2 + 1] = sum;
      }
    }
    const int first = (WIDE ? warp / 4 * V_TILES * 64 + warp % 4 * 16 : warp * V_TILES * 16) + lane / 4;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {  // heads: one address, and the rest of their values at fixed distances
        const int h = n * 8 + lane % 4 * 2 + c;
        if (h >= heads_here) continue;
        float* o = p.partial_o + (part + h) * VD + first;
#pragma unroll
        for (int i = 0; i < V_TILES; ++i) {
          o[i * (WIDE ? 64 : 16)] = s.o[i][n][c];
          o[i * (WIDE ? 64 : 16) + 8] = s.o[i][n][c + 2];
        }
      }
  }
};
