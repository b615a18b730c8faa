// The crossings of one lane: rows go to the peers with a flag behind them, a wait looks at flags in its own memory.
//
// A flag holds an epoch, base + layer + 1, where base lies in device memory, so that a captured graph serves every step.
// Epochs only grow and are compared with >=: nothing is reset. A wait has a deadline; past it, it names the late peer in
// host memory and lets the step run on (its result is worthless and the host knows it). It never traps.
#include "crossing.cuh"
#include "norm_row.cuh"

constexpr int BLOCK = 256;
constexpr int PASS_TOKENS = 32;           // most rows of a pass
constexpr int SAMPLING_WORDS = 8;         // of a row: how its token is drawn

struct NormPutParams {
  LaneView view;
  Flags flags;               // in the peers' memory
  u8* slots[MAX_PEERS];      // the peers' slots: (tokens, hidden) bf16
  const float* residual;     // (tokens, hidden)
  const u16* norm_weight;    // (hidden)
  u16* normed;               // (tokens, hidden) bf16: the same rows here
  int hidden, layer;
  float eps;
  int raises;                // else a router behind this kernel raises the flags
};

// RMSNorm of the residual stream straight to the peers. One block a token; hidden is a multiple of 8.
KERNEL(norm_put, NormPutParams, BLOCK, 1) {
  float* scratch = reinterpret_cast<float*>(dynamic_smem());  // 32
  const i64 base_at = static_cast<i64>(blockIdx.x) * p.hidden;
  NormRow<BLOCK> row(p.norm_weight, p.hidden);
  grid_launch_dependents();
  grid_wait();
  row.read(p.residual + base_at);
  const float scale = row.scale(scratch, p.eps);
#pragma unroll
  for (int n = 0; n < ROW_GROUPS; ++n) {
    if (!row.inside(n)) continue;
    const uint4 packed = row.normed(n, scale);
    for (int peer = 0; peer < p.flags.count; ++peer) store16(p.slots[peer] + (base_at + row.index(n)) * 2, packed);
    store16(p.normed + base_at + row.index(n), packed);
  }
  if (p.raises) raise(p.view, p.flags, load_relaxed(p.view.lane + BASE), p.layer, gridDim.x);
}

struct WaitNormParams {
  LaneView view;
  Flags flags;               // in this rank's memory, one a weights rank
  const u8* slots[MAX_PEERS];  // partial sums (tokens, hidden) fp32, in rank order
  float* residual;           // (tokens, hidden), updated in place
  const u16* norm_weight;
  u16* normed;
  int hidden, layer;
  float eps;
  int are_words;             // partial sums carry their epoch: (tokens, hidden) words, and no flag is awaited
};

// Wait for every partial sum of a layer; residual += them in rank order; normed = RMSNorm(residual). One block a token.
KERNEL(wait_norm, WaitNormParams, BLOCK, 1) {
  float* scratch = reinterpret_cast<float*>(dynamic_smem());  // 32
  const i64 base_at = static_cast<i64>(blockIdx.x) * p.hidden;
  NormRow<BLOCK> row(p.norm_weight, p.hidden);
  if (p.view.early) grid_launch_dependents();
  grid_wait();
  row.read(p.residual + base_at);  // while the peers compute
  const u64 base = load_relaxed(p.view.lane + BASE);
  if (p.are_words) {
    for (int n = 0; n < p.flags.count; ++n)
      row.add_words(reinterpret_cast<const u64*>(p.slots[n]) + base_at, word_epoch(base, p.layer),
                    WordWait(p.view, base, p.layer, n));
    if (!p.view.early) {
      block_sync();  // one thread's call is its block's: kernels behind would take the place of peers still awaited
      grid_launch_dependents();
    }
  } else {
    await(p.view, p.flags, base, p.layer);
    block_sync();
    if (!p.view.early) grid_launch_dependents();
    for (int n = 0; n < p.flags.count; ++n) row.add(reinterpret_cast<const float*>(p.slots[n]) + base_at);
  }
  row.write(p.residual + base_at);
  const float scale = row.scale(scratch, p.eps);
#pragma unroll
  for (int n = 0; n < ROW_GROUPS; ++n)
    if (row.inside(n)) store16(p.normed + base_at + row.index(n), row.normed(n, scale));
}

struct CrossParams {
  LaneView view;
  Flags wait_for;    // in this rank's memory; count 0: none
  Flags raise_for;   // in the peers' memory; count 0: none
  const u8* rows;    // copied to every slot before the flags rise; null: only flags
  u8* slots[MAX_PEERS];
  int row_bytes;     // a multiple of 16
  int wait_layer, raise_layer;
};

// wait, then copy (one block a row), then signal: any of the three may be absent.
KERNEL(cross, CrossParams, BLOCK, 1) {
  if (p.view.early) grid_launch_dependents();
  grid_wait();
  const u64 base = load_relaxed(p.view.lane + BASE);
  if (p.wait_for.count > 0) {
    await(p.view, p.wait_for, base, p.wait_layer);
    block_sync();
  }
  if (!p.view.early) grid_launch_dependents();
  if (p.rows != nullptr) {
    const i64 at = static_cast<i64>(blockIdx.x) * p.row_bytes;
    for (int i = threadIdx.x * 16; i < p.row_bytes; i += BLOCK * 16) {
      const uint4 value = load16(p.rows + at + i);
      for (int peer = 0; peer < p.raise_for.count; ++peer) store16(p.slots[peer] + at + i, value);
    }
  }
  if (p.raise_for.count > 0) raise(p.view, p.raise_for, base, p.raise_layer, gridDim.x);
}

struct BeginParams {
  u64* lane;
  const u32* ring;        // pinned: `ring_slots` records of `record_words`: base (2 words), then ids, positions, lengths, sampling
  const int* last_tokens; // (rows): what the lane's last step sampled; an id of -1 - r stands for row r of it
  int* token_ids;         // (rows) each
  int* positions;
  int* lengths;
  u32* sampling;          // (rows, SAMPLING_WORDS), or null
  int rows, ring_slots, record_words;
};

// The first kernel of a pass: the next record of the ring becomes the pass's input.
KERNEL(begin_pass, BeginParams, 32, 1) {
  grid_launch_dependents();
  grid_wait();
  const u64 cursor = p.lane[CURSOR];
  warp_sync();
  const u32* record = p.ring + static_cast<i64>(cursor % p.ring_slots) * p.record_words;
  if (threadIdx.x == 0) {
    p.lane[BASE] = static_cast<u64>(load_relaxed(record)) | static_cast<u64>(load_relaxed(record + 1)) << 32;
    p.lane[CURSOR] = cursor + 1;
  }
  for (int i = threadIdx.x; i < p.rows; i += 32) {
    const int id = static_cast<int>(load_relaxed(record + 2 + i));
    p.token_ids[i] = id < 0 ? p.last_tokens[-1 - id] : id;
    p.positions[i] = static_cast<int>(load_relaxed(record + 2 + p.rows + i));
    p.lengths[i] = static_cast<int>(load_relaxed(record + 2 + 2 * p.rows + i));
  }
  if (p.sampling != nullptr)
    for (int i = threadIdx.x; i < p.rows * SAMPLING_WORDS; i += 32) p.sampling[i] = load_relaxed(record + 2 + 3 * p.rows + i);
}

struct EndParams {
  LaneView view;
  const int* tokens;   // (rows) sampled, or null
  int* last_tokens;    // (rows)
  int* host_tokens;    // pinned: (ring_slots, PASS_TOKENS)
  int rows, ring_slots, num_layers;
};

// The last kernel of a pass: tokens to the host, then the word that tells it.
KERNEL(end_pass, EndParams, 32, 1) {
  grid_launch_dependents();
  grid_wait();
  const u64 slot = (p.view.lane[CURSOR] - 1) % p.ring_slots;
  if (p.tokens != nullptr)
    for (int i = threadIdx.x; i < p.rows; i += 32) {
      const int token = p.tokens[i];
      p.last_tokens[i] = token;
      p.host_tokens[slot * PASS_TOKENS + i] = token;
    }
  warp_sync();
  if (threadIdx.x == 0) {
    system_fence();
    store_release(p.view.host + DONE, p.view.lane[BASE] + p.num_layers);
  }
}

struct ArgmaxParams {
  const float* logits;  // (rows, vocab)
  float* best;          // (rows, parts)
  int* best_ids;        // (rows, parts)
  int* tickets;         // (rows), zero before and after
  int* tokens;          // (rows)
  int vocab;
};

DEVICE void better(float& v, int& id, float other, int other_id) {
  if (other > v || (other == v && other_id < id)) v = other, id = other_id;
}

DEVICE void block_best(float& v, int& id, float* values, int* ids) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) {
    const float other = shfl_xor(v, mask);
    const int other_id = shfl_xor(id, mask);
    better(v, id, other, other_id);
  }
  if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = v, ids[threadIdx.x / 32] = id;
  block_sync();
  for (int w = 0; w < BLOCK / 32; ++w) better(v, id, values[w], ids[w]);
  block_sync();
}

// The first largest logit of each row: blocks (parts, rows), the last block of a row merges.
KERNEL(argmax, ArgmaxParams, BLOCK, 1) {
  float* values = reinterpret_cast<float*>(dynamic_smem());
  int* ids = reinterpret_cast<int*>(values + 8);
  int* last = ids + 8;
  const int row = blockIdx.y, parts = gridDim.x;
  grid_launch_dependents();
  grid_wait();
  float v = -__builtin_huge_valf();
  int id = p.vocab - 1;  // logits of NaN choose the last token: in bounds
  for (int i = blockIdx.x * BLOCK + threadIdx.x; i < p.vocab; i += parts * BLOCK)
    better(v, id, p.logits[static_cast<i64>(row) * p.vocab + i], i);
  block_best(v, id, values, ids);
  if (threadIdx.x == 0) {
    p.best[row * parts + blockIdx.x] = v;
    p.best_ids[row * parts + blockIdx.x] = id;
    device_fence();
    *last = atomic_add(p.tickets + row, 1) == parts - 1;
    device_fence();
  }
  block_sync();
  if (!*last) return;
  v = -__builtin_huge_valf(), id = p.vocab - 1;
  for (int i = threadIdx.x; i < parts; i += BLOCK)
    better(v, id, load_float_l2(p.best + row * parts + i), *static_cast<volatile int*>(p.best_ids + row * parts + i));
  block_best(v, id, values, ids);
  if (threadIdx.x == 0) p.tokens[row] = id, p.tickets[row] = 0;
}

struct DelayParams {
  i64 nanoseconds;
};

// Passes time: random delays in tests, and stand-ins for work in measurements.
KERNEL(delay, DelayParams, 32, 1) {
  grid_launch_dependents();
  grid_wait();
  const u64 start = timer_ns();
  while (timer_ns() - start < static_cast<u64>(p.nanoseconds)) {}
}
