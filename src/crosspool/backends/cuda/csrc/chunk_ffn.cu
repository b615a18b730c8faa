// What surrounds the large matrix products of a chunk's FFN: rows in, routing of any number of tokens, rows sorted by
// expert, activation, and each token's weighted sum. One token takes the same experts here as among few tokens, because
// `choose` is the same code.
#include "moe.cuh"
#include "router.cuh"

constexpr int ROW_BLOCK = 256;

struct TakeRowsParams {
  const u8* rows;  // (tokens, row_bytes) where a peer puts them
  u8* out;         // the same bytes in memory of our own
  i64 bytes;       // of all rows, a multiple of 16
};

KERNEL(take_rows, TakeRowsParams, ROW_BLOCK, 1) {
  grid_launch_dependents();
  grid_wait();
  const i64 step = static_cast<i64>(gridDim.x) * ROW_BLOCK * 16;
  for (i64 at = (static_cast<i64>(blockIdx.x) * ROW_BLOCK + threadIdx.x) * 16; at < p.bytes; at += step)
    store16(p.out + at, load16(p.rows + at));
}

struct ChunkRouteParams {
  RouterParams router;  // its x, weight, logits and lists are not used
  float* parts;         // (tokens, num_parts * rows) fp32: logits as sums of parts, the largest part first, which
                        // becomes the sum
  int* counts;          // (experts), zero before; the pairs of each expert
  int* ranks;           // (tokens, top_k): a pair's place among those of its expert
  int rows, num_parts;
};

// One warp a token.
KERNEL(chunk_route, ChunkRouteParams, ROUTER_THREADS, 1) {
  const RouterParams& r = p.router;
  const RouterSmem s = router_smem(dynamic_smem());
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token = blockIdx.x * ROUTER_WARPS + warp;
  grid_launch_dependents();
  grid_wait();
  if (token >= r.tokens) return;
  float* parts = p.parts + static_cast<i64>(token) * p.rows * p.num_parts;
  for (int row = lane; row < p.rows; row += 32) {
    float sum = 0.0f;
    for (int part = p.num_parts - 1; part >= 0; --part) sum += parts[part * p.rows + row];  // small ones first
    if (row < r.experts) parts[row] = sum;
    else r.shared_scale[token] = 1.0f / (1.0f + exp_full(-sum));
  }
  device_fence();
  warp_sync();
  const LogitRow logits{parts};
  float *choice = s.choice + warp * MAX_EXPERTS, *scores = s.scores + warp * MAX_EXPERTS;
  if (r.experts <= 128) choose<4>(r, logits, logits.look<4>(r.experts), token, choice, scores, r.topk_ids);
  else choose<MAX_EXPERTS / 32>(r, logits, logits.look<MAX_EXPERTS / 32>(r.experts), token, choice, scores, r.topk_ids);
  if (lane < r.top_k) {
    const i64 pair = static_cast<i64>(token) * r.top_k + lane;
    p.ranks[pair] = atomic_add(p.counts + r.topk_ids[pair], 1);
  }
}

struct ExpertStartsParams {
  int* counts;  // (experts): read, then zero for the next layer
  int* starts;  // (experts): where each expert's rows begin
  int* ends;    // (experts)
  int experts;
};

// One block of as many threads as there may be experts.
KERNEL(expert_starts, ExpertStartsParams, MAX_EXPERTS, 1) {
  int* sums = reinterpret_cast<int*>(dynamic_smem());  // 2 * MAX_EXPERTS
  const int e = threadIdx.x;
  grid_launch_dependents();
  grid_wait();
  const int count = e < p.experts ? p.counts[e] : 0;
  int from = 0;
  sums[e] = count;
  block_sync();
  for (int step = 1; step < MAX_EXPERTS; step *= 2) {
    const int to = MAX_EXPERTS - from;
    sums[to + e] = sums[from + e] + (e >= step ? sums[from + e - step] : 0);
    from = to;
    block_sync();
  }
  if (e >= p.experts) return;
  p.ends[e] = sums[from + e];
  p.starts[e] = sums[from + e] - count;
  p.counts[e] = 0;
}

struct SortRowsParams {
  const u16* x;        // (tokens, hidden)
  const int* ids;      // (tokens, top_k)
  const int* ranks;    // (tokens, top_k)
  const int* starts;   // (experts)
  u16* sorted;         // (tokens * top_k, hidden): rows grouped by expert
  int* places;         // (tokens, top_k): each pair's row in `sorted`
  int* row_experts;    // (tokens * top_k): each row's expert
  int hidden, top_k;
};

// One block a token: its row to each of its experts' rows.
KERNEL(sort_rows, SortRowsParams, ROW_BLOCK, 1) {
  int* places = reinterpret_cast<int*>(dynamic_smem());  // top_k
  const i64 token = blockIdx.x;
  grid_launch_dependents();
  grid_wait();
  if (threadIdx.x < static_cast<unsigned>(p.top_k)) {
    const i64 pair = token * p.top_k + threadIdx.x;
    const int id = p.ids[pair], place = p.starts[id] + p.ranks[pair];
    places[threadIdx.x] = p.places[pair] = place;
    p.row_experts[place] = id;
  }
  block_sync();
  for (int i = threadIdx.x * 8; i < p.hidden; i += ROW_BLOCK * 8) {
    const uint4 value = load16(p.x + token * p.hidden + i);
    for (int k = 0; k < p.top_k; ++k) store16(p.sorted + static_cast<i64>(places[k]) * p.hidden + i, value);
  }
}

struct ActivateParams {
  const u16* gate;         // (rows, stride) bf16; up lies `up_offset` elements behind
  const u16* bias;         // (experts, 2 * width) bf16, gate then up, or null
  const int* row_experts;  // (rows), read where there is a bias
  u16* out;                // (rows, width) bf16
  i64 stride, up_offset, rows;
  int width, activation;   // width: a multiple of 8
};

DEVICE void unpack8(uint4 from, float (&to)[8]) {
  to[0] = bf16_low(from.x), to[1] = bf16_high(from.x), to[2] = bf16_low(from.y), to[3] = bf16_high(from.y);
  to[4] = bf16_low(from.z), to[5] = bf16_high(from.z), to[6] = bf16_low(from.w), to[7] = bf16_high(from.w);
}

// Eight elements a thread.
KERNEL(activate_rows, ActivateParams, ROW_BLOCK, 1) {
  grid_launch_dependents();
  grid_wait();
  const int groups = p.width / 8;
  const i64 item = static_cast<i64>(blockIdx.x) * ROW_BLOCK + threadIdx.x;
  if (item >= p.rows * groups) return;
  const i64 row = item / groups;
  const int at = static_cast<int>(item - row * groups) * 8;
  float gate[8], up[8];
  unpack8(load16(p.gate + row * p.stride + at), gate);
  unpack8(load16(p.gate + row * p.stride + p.up_offset + at), up);
  if (p.bias != nullptr) {
    const u16* bias = p.bias + static_cast<i64>(p.row_experts[row]) * 2 * p.width + at;
    for (int j = 0; j < 8; ++j) gate[j] += bf16_value(bias[j]), up[j] += bf16_value(bias[p.width + j]);
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) gate[j] = activate(p.activation, gate[j], up[j]);
  store16(p.out + row * p.width + at, uint4{pack_bf16(gate[0], gate[1]), pack_bf16(gate[2], gate[3]),
                                            pack_bf16(gate[4], gate[5]), pack_bf16(gate[6], gate[7])});
}

struct CombineRowsParams {
  const u16* down;            // (tokens * top_k, hidden) bf16 in the order of experts, or null: a dense layer
  const int* places;          // (tokens, top_k)
  const int* ids;             // (tokens, top_k), read where there is a bias
  const float* weights;       // (tokens, top_k)
  const u16* bias;            // (experts, hidden) bf16 of down, or null
  const u16* shared;          // (tokens, hidden) bf16, or null
  const float* shared_scale;  // (tokens), or null: 1
  float* out;                 // (tokens, hidden) fp32, maybe a peer's memory
  int hidden, top_k;
};

// One block a token: its experts in the order of choice, then the shared ones.
KERNEL(combine_rows, CombineRowsParams, ROW_BLOCK, 1) {
  const i64 token = blockIdx.x;
  grid_launch_dependents();
  grid_wait();
  for (int i = threadIdx.x * 8; i < p.hidden; i += ROW_BLOCK * 8) {
    float sum[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}, v[8];
    for (int k = 0; k < p.top_k; ++k) {
      const i64 pair = token * p.top_k + k;
      const float weight = p.weights[pair];
      unpack8(load16(p.down + static_cast<i64>(p.places[pair]) * p.hidden + i), v);
      if (p.bias != nullptr) {
        const u16* bias = p.bias + static_cast<i64>(p.ids[pair]) * p.hidden + i;
        for (int j = 0; j < 8; ++j) v[j] += bf16_value(bias[j]);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] += weight * v[j];
    }
    if (p.shared != nullptr) {
      const float scale = p.shared_scale != nullptr ? p.shared_scale[token] : 1.0f;
      unpack8(load16(p.shared + token * p.hidden + i), v);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] += scale * v[j];
    }
    u8* out = reinterpret_cast<u8*>(p.out + token * p.hidden + i);
    uint4 low, high;
    low.x = bits_of_float(sum[0]), low.y = bits_of_float(sum[1]), low.z = bits_of_float(sum[2]), low.w = bits_of_float(sum[3]);
    high.x = bits_of_float(sum[4]), high.y = bits_of_float(sum[5]), high.z = bits_of_float(sum[6]), high.w = bits_of_float(sum[7]);
    store16(out, low);
    store16(out + 16, high);
  }
}
