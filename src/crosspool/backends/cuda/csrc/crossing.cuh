// Where kernels of two ranks meet: flags that the consumer polls in its own memory, and the words of a lane.
#pragma once
#include "system.cuh"

constexpr int MAX_PEERS = 8;
constexpr int POLLS_PER_LOOK = 16;        // flag loads between two looks at the clock
constexpr unsigned CROWD = 4;             // blocks that may poll one flag without pauses
constexpr u64 ABORT_LOOK_NS = 20000;      // host memory is far away: one block looks, this seldom

constexpr u64 STEP = 1024;                // epochs of one step, whose passes share them

enum LaneWord { BASE = 0, FAILED = 1, CURSOR = 2, TICKET = 3, ENDED = 4 };
enum HostWord { DONE = 0, ABORT = 1, LATE = 2, POSTED = LATE + MAX_PEERS, SEEN = POSTED + 1 };

struct LaneView {
  u64* lane;        // device: base of the running pass, base of the last failed pass, cursor, ticket, rows of the run that ended
  u64* host;        // pinned: done, abort, a word for each peer (the epoch that came too late), passes posted to a server, newest crossing
  i64 deadline_ns;  // below 0: no wait at all (profilers run kernels one at a time)
  int early;        // dependents may start while a wait spins: faster alone, but they hold their multiprocessors
};

struct Flags {
  u64* flag[MAX_PEERS];
  int count;
};

// Whether a wait of the step gave up: what the step computes from there on is void.
DEVICE bool has_failed(const LaneView& v, u64 base) { return load_relaxed(v.lane + FAILED) / STEP == base / STEP; }

DEVICE void expire(const LaneView& v, u64 base, u64 want, int peer) {
  store_release(v.host + LATE + peer, want);
  store_relaxed(v.lane + FAILED, base);  // the step's other waits give up at once
}

// Thread `peer` < flags.count waits for its flag; call block_sync afterwards.
DEVICE void await(const LaneView& v, const Flags& flags, u64 base, int layer) {
  const int peer = threadIdx.x;
  if (peer >= flags.count || v.deadline_ns < 0) return;
  const u64 want = base + layer + 1;
  // Polls are relaxed, and rarer where many blocks poll; one acquiring load at the end orders what the block reads.
  const bool crowded = gridDim.x > CROWD;
  const u64* flag = flags.flag[peer];
  const u64 start = timer_ns();
  u64 looked = start;
  while (true) {
    for (int i = 0; i < POLLS_PER_LOOK; ++i) {
      if (load_relaxed(flag) >= want) {
        load_acquire(flag);
        return;
      }
      if (crowded) pause_ns(100);
    }
    if (has_failed(v, base)) return expire(v, base, want, peer);
    const u64 now = timer_ns();
    if (now - start > static_cast<u64>(v.deadline_ns)) return expire(v, base, want, peer);
    if (blockIdx.x == 0 && now - looked > ABORT_LOOK_NS) {  // the other blocks learn of it by FAILED
      looked = now;
      if (load_relaxed(v.host + ABORT) >= base) return expire(v, base, want, peer);
    }
  }
}

// Sums that carry their epoch: a value and the low half of its layer's epoch in one 8-byte word, so that no flag and no
// fence stands between a producer's store and the consumer's look.
DEVICE u32 word_epoch(u64 base, int layer) { return static_cast<u32>(base + layer + 1); }
constexpr u32 VOID_EPOCH = 0;  // of sums that nobody is to take: no layer has it, since a step's epochs begin with 1
DEVICE u64 sum_word(float v, u32 epoch) { return static_cast<u64>(epoch) << 32 | bits_of_float(v); }

// Whether a look at words is the last: they will not come. Every thread that waits has its own.
struct WordWait {
  const LaneView& v;
  u64 base, want, start;
  int peer, looks;

  DEVICE WordWait(const LaneView& v, u64 base, int layer, int peer)
      : v(v), base(base), want(base + layer + 1), start(timer_ns()), peer(peer), looks(0) {}
  DEVICE bool is_over() {
    if (v.deadline_ns < 0) return true;
    if (++looks % POLLS_PER_LOOK) return false;
    const u64 now = timer_ns();
    const bool asks_host = threadIdx.x == 0 && blockIdx.x == 0 && looks % (POLLS_PER_LOOK * 64) == 0;
    if (!has_failed(v, base) && now - start <= static_cast<u64>(v.deadline_ns) &&
        !(asks_host && load_relaxed(v.host + ABORT) >= base))
      return false;
    expire(v, base, want, peer);
    return true;
  }
};

// Every block calls this after its last store to the peers; the last one raises the flags. Of a step that has failed here
// no peer is told: it would go on with what is void, and may be the one whose word ends the step.
DEVICE void raise(const LaneView& v, const Flags& flags, u64 base, int layer, int blocks) {
  block_sync();
  if (threadIdx.x != 0) return;
  const bool is_void = has_failed(v, base);  // on its way during the fence
  system_fence();
  if (blocks > 1) {
    if (atomic_add(reinterpret_cast<int*>(v.lane + TICKET), 1) != blocks - 1) return;
    *reinterpret_cast<int*>(v.lane + TICKET) = 0;
    system_fence();
  }
  for (int i = 0; i < flags.count && !is_void; ++i) store_relaxed(flags.flag[i], base + layer + 1);
}

// A kernel's first look at rows that a peer puts: `flags` are in this rank's memory; count 0: nothing to wait for.
struct Arrival {
  LaneView view;
  Flags flags;
  int layer;
};

// A kernel's word that its output lies in the peers' memory; count 0: nobody to tell.
struct Departure {
  LaneView view;
  Flags flags;
  int layer;
};

// After a block's last store of its output.
DEVICE void depart(const Departure& departure, int blocks) {
  if (departure.flags.count == 0) return;
  raise(departure.view, departure.flags, load_relaxed(departure.view.lane + BASE), departure.layer, blocks);
}
