// The FFN of few tokens by blocks that hold the whole device: router, gate and up, down. Every block chooses experts for
// itself once it finds all logits, which carry the meeting's epoch; before down all blocks meet. The stream of weights
// hardly pauses: shared experts' tiles are on their way before the router has ended, and each block's part of the down
// projection before the last activation is there.
#pragma once
#include "moe_steps.cuh"
#include "router.cuh"

struct FusedParams {
  RouterParams route;  // all zero in a dense layer, but for its arrival
  MoeParams moe;
  u64* meetings;   // arrivals of blocks; every launch on it has the same grid
  u64* logits;     // (tokens, rows): value below, epoch above; of one counter of meetings
  int rows;        // of the router; 0: a dense layer
  int work_bytes;  // scratch between the streams and the lists
};

struct FusedLayer {
  const FusedParams& p;
  u8* smem;
  u8* work;
  float* weights;  // tokens * top_k
  int* unique;
  const Lists lists;
  const RouterSmem router;
  UpStep up;
  const RouterRow first;  // this block's first row of the router

  DEVICE FusedLayer(const FusedParams& p, u8* smem)
      : p(p), smem(smem), work(smem + STREAM_BYTES), weights(reinterpret_cast<float*>(work + p.work_bytes)),
        unique(reinterpret_cast<int*>(weights + p.moe.tokens * p.moe.top_k)), lists(p.moe, unique + 1),
        router(router_smem(work)), up(p.moe, smem, lists, reinterpret_cast<float*>(work)),
        first(p.route, min_int(blockIdx.x, p.rows - 1)) {}

  // Start on what does not depend on the rows.
  DEVICE void load_shared() { up.load_shared(); }

  // The rows are there. epoch_out: that words of the output carry.
  DEVICE void run(GridMeeting& meeting, u32 epoch_out) {
    const MoeParams& m = p.moe;
    const u32 epoch = meeting.epoch();
    int row = blockIdx.x;
    const auto put = [&](int t, float logit) {
      store_relaxed_device(p.logits + t * p.rows + row, LogitWords::word(logit, epoch));
    };
    if (row < p.rows) first.logits(p.route, row, router.sums, put);
    for (row += gridDim.x; row < p.rows; row += gridDim.x) RouterRow(p.route, row).logits(p.route, row, router.sums, put);
    up.load_shared();

    RouterParams local = p.route;  // every block chooses for itself
    local.topk_ids = lists.tokens;  // in the meantime
    local.topk_weights = weights;
    local.num_unique = unique;
    local.unique_ids = lists.ids;
    local.unique_offsets = lists.offsets;
    local.expert_pairs = lists.pairs;
    choose_all(local, router, [&](int t) { return LogitWords{p.logits + t * p.rows, epoch}; });
    block_sync();
    for (int i = threadIdx.x; i < p.route.tokens * m.top_k; i += MOE_THREADS) {
      lists.tokens[i] = lists.pairs[i] / m.top_k;
      if (blockIdx.x == 0) p.route.topk_ids[i] = router.chosen[i], p.route.topk_weights[i] = weights[i];
    }
    if (blockIdx.x == 0 && threadIdx.x == 0 && p.rows > 0) *p.route.num_unique = *unique;
    block_sync();
    up.run(*unique);

    block_sync();  // the scratch changes hands
    meeting.arrive();
    DownStep down(m, smem, lists, weights, reinterpret_cast<float*>(work), *unique);
    const int row_tiles = ceil_div(m.hidden, TILE_ROWS);
    if (static_cast<int>(blockIdx.x) < row_tiles) down.begin(blockIdx.x);
    meeting.wait();
    for (int tile = blockIdx.x; tile < row_tiles; tile += gridDim.x) {
      if (tile != static_cast<int>(blockIdx.x)) down.begin(tile);
      down.run(epoch_out);
    }
  }
};
