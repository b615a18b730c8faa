// The FFN of few tokens by blocks that hold the whole device: router, gate and up, down. Every block finds all logits, which
// carry the meeting's epoch, and chooses experts for itself, or of many tokens each block for some; or it takes what came with
// the rows. It is made twice, for up to eight tokens and for more: what runs is small then. Before down
// all blocks meet or, where activations are few, each looks for them: they carry the epoch too. The stream of weights
// hardly pauses: shared experts' tiles are on their way before the router has ended, and each block's part of the down
// projection before the last activation is there.
#pragma once
#include "moe_down.cuh"
#include "moe_up.cuh"
#include "router.cuh"

struct FusedParams {
  RouterParams route;  // all zero in a dense layer, but for its arrival; without a weight, ids and weights are there
  MoeParams moe;
  u64* meetings;   // arrivals of blocks; every launch on it has the same grid
  u64* logits;     // (tokens, rows): value below, epoch above; of one counter of meetings
  u64* choices;    // (tokens, top_k): an id and a weight, each with the same epoch
  int rows;        // of the router; 0: none here
  int work_bytes;  // scratch between the streams and the lists: of the router, of sums and columns, or `near_values`
};

// Whether a layer's tokens are few: their activations take no room in down, and weights have a stage more.
DEVICE bool is_few(const FusedParams& p) { return p.moe.near_values > 0 || TokenTable::serves(p.moe.tokens); }

template <bool FEW>
struct FusedLayer {
  static constexpr int STAGES = FEW ? FEW_STAGES : UP_STAGES;
  static constexpr int LATER_STAGES = 2;  // of down, behind the first look at activations, which would wait for them too
  const FusedParams& p;
  u8* smem;
  u8* work;
  float* weights;  // tokens * top_k
  int* unique;
  const Lists lists;
  const RouterSmem router;
  UpStep<STAGES, FEW ? 1 : MAX_GROUPS> up;
  const RouterRow first;  // this block's first row of the router

  DEVICE FusedLayer(const FusedParams& p, u8* smem)
      : p(p), smem(smem), work(smem + STAGES * STAGE_BYTES), weights(reinterpret_cast<float*>(work + p.work_bytes)),
        unique(reinterpret_cast<int*>(weights + p.moe.tokens * p.moe.top_k)), lists(p.moe, unique + 1),
        router(router_smem(work)), up(p.moe, smem, lists, reinterpret_cast<float*>(work)),
        first(p.route, min_int(blockIdx.x, p.rows - 1)) {}

  // Start on what does not depend on the rows.
  DEVICE void load_shared() { up.load_shared(); }

  // The rows are there, or the pass of this base was given up. epoch_of_out(): that words of the output carry.
  template <class Epoch>
  DEVICE void run(GridMeeting& meeting, u64 base, const Epoch& epoch_of_out) {
    const MoeParams& m = p.moe;
    const u32 epoch = meeting.epoch();
    if (p.rows > 0) choose_here(epoch);
    else take_choices();
    list_here();
    block_sync();
    // As words only where every block makes some: then none is left behind by those that find all. Nor where one block
    // has just stored the shared expert's gate for all: words would not bring it, a meeting does. Nor where rows were
    // given up and the lists lack pairs, whose words nobody would make.
    const bool are_near = FEW && m.near_values > 0;
    const int tiles = up.shared_tiles + *unique * up.tiles;
    const bool brings_gate = p.rows > 0 && m.shared_scale != nullptr;
    const bool has_all_pairs = lists.offsets[*unique] == p.route.tokens * m.top_k;
    const bool are_words =
        are_near && has_all_pairs && !brings_gate && m.act_words != nullptr && tiles >= static_cast<int>(gridDim.x);
    up.writes_words = are_words;
    up.epoch = epoch;
    float* sums = reinterpret_cast<float*>(work);
    u8* table_at = work + MOE_WARPS * m.tokens * OUT_STRIDE * 4;
    u8* near = table_at + TokenTable::num_bytes(m);
    const TokenTable table(table_at, m.max_unique);
    DownStep<STAGES> down(m, smem, near, lists, weights, sums, *unique);
    int first_stage = 0;
    if constexpr (FEW) {  // one stream would be slower: its code is larger
      NothingNext nothing;
      up.run(*unique, nothing);
    } else {
      down.choose_tile(blockIdx.x);
      first_stage = up.run(*unique, down);  // weights of down follow those of gate and up
    }

    block_sync();  // the scratch changes hands
    if (are_words) meeting.pass_by();
    else meeting.arrive();
    const int row_tiles = ceil_div(m.hidden, TILE_ROWS);
    if constexpr (FEW) down.begin(blockIdx.x, are_words ? STAGES - LATER_STAGES : STAGES);
    else down.go_on(first_stage);
    const bool has_table = FEW && TokenTable::serves(m.tokens);
    if (has_table) table.fill(lists, weights, *unique);
    u16* own = reinterpret_cast<u16*>(near);
    if (are_words) gather_words(m, epoch, own, [&] { return may_differ(base); }, [&] { down.load_more(LATER_STAGES); });
    else meeting.wait();
    if (are_near) {
      if (!are_words) gather(m, own);
      down.acts = Acts(m, own);
      block_sync();
    }
    const u32 epoch_out = epoch_of_out();
    for (int tile = blockIdx.x; tile < row_tiles; tile += gridDim.x) {
      if (tile != static_cast<int>(blockIdx.x)) down.begin(tile);
      if constexpr (FEW) {
        if (m.tokens == 1) down.run_one(epoch_out);
        else down.run_few(table, epoch_out);
      } else {
        down.run(epoch_out);
      }
    }
  }

 private:
  // Whether blocks may not agree on experts that come with the rows: a peer that is too late, or that no wait holds back (a
  // profiler's passes), may write them while blocks read them.
  DEVICE bool may_differ(u64 base) const {
    const LaneView& v = p.moe.departure.view;
    return p.rows == 0 && p.route.tokens > 0 && v.lane != nullptr && (v.deadline_ns < 0 || has_failed(v, base));
  }
  // Logits of this block's rows to all, choices from everybody's.
  DEVICE void choose_here(u32 epoch) {
    const MoeParams& m = p.moe;
    const auto put = [&](int t, int row, float logit) {
      store_relaxed_device(p.logits + t * p.rows + row, LogitWords::word(logit, epoch));
    };
    const int blocks = gridDim.x;
    if constexpr (!FEW) {
  #pragma unroll 1
      for (int tile = blockIdx.x; tile < RouterTile::num_tiles(m.tokens, p.rows, blocks); tile += blocks)
        RouterTile::at(p.route, p.rows, tile, blocks).logits(router.choice, put);
    } else {
      RouterRow weight = first;
  #pragma unroll 1
      for (int row = blockIdx.x; row < p.rows; row += blocks) {
        if (row != static_cast<int>(blockIdx.x)) weight = RouterRow(p.route, row);
        weight.logits(p.route, row, router.sums, [&](int t, float logit) { put(t, row, logit); });
      }
    }
    up.load_shared();

    RouterParams local = p.route;
    local.topk_ids = router.chosen;
    local.topk_weights = weights;
    const auto row = [&](int t) { return LogitWords{p.logits + t * p.rows, epoch}; };
    if constexpr (FEW) {  // every block chooses for itself
      choose_tokens(local, router, row);
    } else {
      choose_tokens(local, router, row, blockIdx.x, blocks);
      share_choices(epoch);
    }
  #pragma unroll 1
    for (int i = threadIdx.x; blockIdx.x == 0 && i < p.route.tokens * m.top_k; i += MOE_THREADS)
      p.route.topk_ids[i] = router.chosen[i], p.route.topk_weights[i] = weights[i];
  }
  // This block's choices to all, and everybody's.
  DEVICE void share_choices(u32 epoch) {
    const int top_k = p.moe.top_k, pairs = p.route.tokens * top_k;
  #pragma unroll 1
    for (int i = threadIdx.x; i < pairs; i += MOE_THREADS) {
      if (i / top_k % static_cast<int>(gridDim.x) != static_cast<int>(blockIdx.x)) continue;
      store_relaxed_device(p.choices + 2 * i, static_cast<u64>(epoch) << 32 | static_cast<u32>(router.chosen[i]));
      store_relaxed_device(p.choices + 2 * i + 1, LogitWords::word(weights[i], epoch));
    }
  #pragma unroll 1
    for (int i = threadIdx.x; i < pairs; i += MOE_THREADS) {
      uint4 words = load_words(p.choices + 2 * i);
      while (words.y != epoch || words.w != epoch) {
        spin();
        words = load_words(p.choices + 2 * i);
      }
      router.chosen[i] = static_cast<int>(words.x), weights[i] = float_of_bits(words.z);
    }
    block_sync();
  }
  // Ids and weights that came with the rows; a dense layer has none.
  DEVICE void take_choices() {
  #pragma unroll 1
    for (int i = threadIdx.x; i < p.route.tokens * p.moe.top_k; i += MOE_THREADS) {
      router.chosen[i] = known_expert(p.route, load_u32_l2(p.route.topk_ids + i));
      weights[i] = load_float_l2(p.route.topk_weights + i);
    }
    block_sync();
  }
  // The lists of what was chosen.
  DEVICE void list_here() {
    RouterParams local = p.route;
    local.num_unique = unique;
    local.unique_ids = lists.ids;
    local.unique_offsets = lists.offsets;
    local.expert_pairs = lists.pairs;
    if (p.route.tokens == 0) {
      *unique = lists.offsets[0] = 0;
      return;
    }
    list_experts(local, router);
    block_sync();
  #pragma unroll 1
    for (int i = threadIdx.x; i < p.route.tokens * p.moe.top_k; i += MOE_THREADS)
      lists.pairs[i] = Lists::entry(lists.pairs[i], p.moe.top_k);
    if (p.rows > 0 && blockIdx.x == 0 && threadIdx.x == 0) *p.route.num_unique = *unique;
  }
};
