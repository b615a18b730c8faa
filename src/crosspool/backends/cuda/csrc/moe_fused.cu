// The FFN of few tokens as one kernel that holds the whole device: router, gate and up, down. Every block chooses experts
// for itself once it finds all logits, which carry the launch's epoch; before down all blocks meet. The stream of weights
// hardly pauses: shared experts' tiles are on their way before the router has ended, and each block's part of the down
// projection before the last activation is there.
//
// NOTE: blocks wait for each other, so all of them must be resident: the launch is cooperative, one block a
// multiprocessor.
#include "moe_steps.cuh"
#include "router.cuh"

struct FusedParams {
  RouterParams route;
  MoeParams moe;
  u64* meetings;   // arrivals of blocks; every launch on it has the same grid
  u64* logits;     // (tokens, rows): value below, epoch above
  int rows;        // of the router
  int work_bytes;  // scratch between the streams and the lists
};

KERNEL(moe_fused, FusedParams, MOE_THREADS, 1) {
  const MoeParams& m = p.moe;
  u8* work = dynamic_smem() + STREAM_BYTES;
  float* weights = reinterpret_cast<float*>(work + p.work_bytes);  // tokens * top_k
  int* unique = reinterpret_cast<int*>(weights + m.tokens * m.top_k);
  const Lists lists(m, unique + 1);
  const RouterSmem router = router_smem(work);
  UpStep up(m, dynamic_smem(), lists, reinterpret_cast<float*>(work));

  int row = blockIdx.x;
  const RouterRow first(p.route, min_int(row, p.rows - 1));
  if (p.route.arrival.flags.count > 0) up.load_shared();  // there is time; else routing comes first
  grid_wait_for(p.route.arrival);
  GridMeeting meeting(p.meetings);
  const u32 epoch = meeting.epoch();
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
  for (int i = threadIdx.x; i < m.tokens * m.top_k; i += MOE_THREADS) {
    lists.tokens[i] = lists.pairs[i] / m.top_k;
    if (blockIdx.x == 0) p.route.topk_ids[i] = router.chosen[i], p.route.topk_weights[i] = weights[i];
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.route.num_unique = *unique;
  block_sync();
  up.run(*unique);

  block_sync();  // the scratch changes hands
  meeting.arrive();
  DownStep down(m, dynamic_smem(), lists, weights, reinterpret_cast<float*>(work), *unique);
  const int row_tiles = ceil_div(m.hidden, TILE_ROWS);
  if (static_cast<int>(blockIdx.x) < row_tiles) down.begin(blockIdx.x);
  meeting.wait();
  for (int tile = blockIdx.x; tile < row_tiles; tile += gridDim.x) {
    if (tile != static_cast<int>(blockIdx.x)) down.begin(tile);
    down.run();
  }
  depart(m.departure, gridDim.x);
}
