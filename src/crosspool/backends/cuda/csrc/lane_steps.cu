// How a lane's steps and their halves follow one another: what the host is told between two halves of a layer, where it drives
// them, and what decides on the device whether a run goes on with its next step.
#include "crossing.cuh"

constexpr int PASS_TOKENS = 32;
constexpr int STOP_IDS = 8;  // of a row

// Words of a pass's record behind `run_at`: the epoch that flags are raised to where the run ends early (two words), steps
// of the run behind this one, this step's number in the run, rows in use, and of each row the first slot that it has not and
// its stop tokens (-1: none); then, as bits, the rows of the run before whose sequences are all that this run has (0: it has
// others too), and whether the host knows already that there is nothing to do.
enum RunWord { OVER = 0, LEFT = 2, STEP_OF_RUN = 3, ROWS = 4, LIMITS = 5, STOPS = LIMITS + PASS_TOKENS,
               FOLLOWS = STOPS + STOP_IDS * PASS_TOKENS, IS_OVER = FOLLOWS + 1 };

#ifdef CROSSPOOL_EMULATOR
DEVICE void set_conditional(u64, bool) {}
#else
#ifdef __CUDACC_RTC__
extern "C" __device__ void cudaGraphSetConditional(u64 handle, unsigned value);
#endif
DEVICE void set_conditional(u64 handle, bool value) { cudaGraphSetConditional(handle, value); }
#endif

struct SeeParams {
  LaneView view;
  Flags flags;  // in this rank's memory, one a peer
  int layer;
};

// Wait for every peer's part of a layer, then tell the host, which launches what comes next.
KERNEL(see, SeeParams, 32, 1) {
  grid_launch_dependents();
  grid_wait();
  const u64 base = load_relaxed(p.view.lane + BASE);
  await(p.view, p.flags, base, p.layer);
  warp_sync();
  if (threadIdx.x == 0) {
    system_fence();
    store_release(p.view.host + SEEN, base + p.layer + 1);
  }
}

struct AdvanceParams {
  LaneView view;
  Flags flags;       // on the KV rank in the peers' memory; on a weights rank that of the rows in its own
  const u32* ring;   // pinned, as in begin_pass
  const int* tokens; // (rows): what the step sampled; null on a weights rank
  int* host_tokens;  // pinned: (ring_slots, PASS_TOKENS)
  u64 again;         // the graph's condition: whether its body runs once more; 0: none
  int rows, ring_slots, record_words, run_at, num_layers;
};

// KV rank, before a run's first step: whether one of its rows goes on. Where all of them follow rows of the run before, that
// may have ended with them; and a run behind one that failed does not begin.
DEVICE bool rows_have_work(const AdvanceParams& p, const u32* run) {
  const u64 before = load_relaxed(p.view.lane + BASE);
  const u32 follows = load_relaxed(run + FOLLOWS), ended = static_cast<u32>(p.view.lane[ENDED]);
  if (load_relaxed(run + IS_OVER) != 0) return false;
  return follows == 0 || ((ended & follows) != follows && !has_failed(p.view, before));
}

// KV rank: whether some row has not drawn one of its stop tokens, and every row has a slot for the next step.
DEVICE bool rows_go_on(const AdvanceParams& p, const u32* record, const u32* run) {
  const int row = threadIdx.x, rows = static_cast<int>(load_relaxed(run + ROWS));
  const bool is_mine = row < rows;
  u32 ended = load_relaxed(run + STEP_OF_RUN) == 0 ? 0 : static_cast<u32>(p.view.lane[ENDED]);
  bool lacks_slot = false;
  if (is_mine) {
    const int token = p.tokens[row], position = static_cast<int>(load_relaxed(record + 2 + p.rows + row));
    for (int i = 0; i < STOP_IDS; ++i)
      if (static_cast<int>(load_relaxed(run + STOPS + row * STOP_IDS + i)) == token) ended |= 1u << row;
    lacks_slot = position + 1 >= static_cast<int>(load_relaxed(run + LIMITS + row));
  }
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) ended |= static_cast<u32>(shfl_xor(static_cast<int>(ended), mask));
  warp_sync();
  if (threadIdx.x == 0) p.view.lane[ENDED] = ended;
  const u32 all = rows == 32 ? ~0u : (1u << rows) - 1;
  return ended != all && warp_max_u32(lacks_slot) == 0;
}

// Weights rank: whether rows of the next step come, for which it waits.
DEVICE bool rows_come(const AdvanceParams& p, u64 over, u64 next_base) {
  await(p.view, p.flags, next_base, 0);
  warp_sync();
  return load_relaxed(p.flags.flag[0]) < over;
}

// The run ends before its last step: its other records are skipped, and nobody waits for them.
DEVICE void end_run(const AdvanceParams& p, u64 over, u64 cursor, u32 left) {
  if (p.tokens != nullptr)
    for (u32 i = threadIdx.x; i < left; i += 32) p.host_tokens[(cursor + i) % p.ring_slots * PASS_TOKENS] = -1;
  warp_sync();
  if (threadIdx.x != 0) return;
  p.view.lane[CURSOR] = cursor + left;
  system_fence();
  if (p.tokens != nullptr)
    for (int i = 0; i < p.flags.count; ++i) store_relaxed(p.flags.flag[i], over);
  store_release(p.view.host + DONE, over);
}

// Where a step's record lies in the ring, and what of it is about its run.
struct RunRecord {
  const u32 *record, *run;
  u32 left;
  u64 over;
  DEVICE RunRecord(const AdvanceParams& p, u64 at)
      : record(p.ring + static_cast<i64>(at % p.ring_slots) * p.record_words), run(record + p.run_at),
        left(load_relaxed(run + LEFT)),
        over(static_cast<u64>(load_relaxed(run + OVER)) | static_cast<u64>(load_relaxed(run + OVER + 1)) << 32) {}
};

// Before a run's first step: is there anything to do? The run before may have ended early, and its host look elsewhere.
KERNEL(open_run, AdvanceParams, 32, 1) {
  grid_launch_dependents();
  grid_wait();
  const u64 cursor = p.view.lane[CURSOR];
  const RunRecord r(p, cursor);
  const u64 base = static_cast<u64>(load_relaxed(r.record)) | static_cast<u64>(load_relaxed(r.record + 1)) << 32;
  const bool begins = p.tokens != nullptr ? rows_have_work(p, r.run) : rows_come(p, r.over, base);
  warp_sync();
  if (!begins) end_run(p, r.over, cursor, r.left + 1);
  if (threadIdx.x == 0 && p.again) set_conditional(p.again, begins);
}

// Behind the last kernel of a step: does the run go on?
KERNEL(advance, AdvanceParams, 32, 1) {
  grid_launch_dependents();
  grid_wait();
  const u64 cursor = p.view.lane[CURSOR], base = p.view.lane[BASE];
  const RunRecord r(p, cursor - 1);
  // Also of the last step: the run behind it may have nothing to do then.
  bool goes_on = p.tokens == nullptr || rows_go_on(p, r.record, r.run);
  if (r.left > 0) {
    if (p.tokens == nullptr) goes_on = rows_come(p, r.over, base + p.num_layers);
    goes_on = goes_on && !has_failed(p.view, base);
    warp_sync();
    if (!goes_on) end_run(p, r.over, cursor, r.left);
  } else {
    goes_on = false;
  }
  if (threadIdx.x == 0 && p.again) set_conditional(p.again, goes_on);
}

struct ReleaseParams {
  Flags flags;  // in the peers' memory
  u64 epoch;
};

// Nobody waits for more of a run that its host has ended.
KERNEL(release, ReleaseParams, 32, 1) {
  grid_launch_dependents();
  grid_wait();
  if (threadIdx.x < p.flags.count) store_release(p.flags.flag[threadIdx.x], p.epoch);
}
