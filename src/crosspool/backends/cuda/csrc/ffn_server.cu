// The FFN server: one kernel that stays on a weights GPU and computes layers as their rows arrive, for every lane and
// model, with no launch between two of them.
//
// A lane's pass is a row of served layers in device memory. The host posts passes (`post`); block 0 looks which lane's
// rows have arrived, gives that layer to all blocks in one word, and so decides the order of lanes on the GPU. The last
// block to end raises the flag behind the sums. The server leaves on command, or after an idle time, but never while a
// pass is under way. Nothing traps or hangs: a pass whose peer is late past the deadline, or that the host gives up, is
// ended, and the host knows its result is worthless.
#include "moe_layer.cuh"

constexpr int MAX_LANES = 16;
constexpr int LOOKS = 32;  // looks at the flags between two at the host's words, while a pass is under way
constexpr u32 TURNS = 8;   // layers between two looks for passes of lanes that have none, however soon rows come
constexpr int NO_LANE = -1;

enum ServerWord { STOP = 0, LEFT = 1 };            // pinned: the launch that is to leave; the launch that left
// Device: sequence and layer; base of its pass; epoch to tell the host, or 0; the rows' epoch where they were not there
// yet, or 0.
enum OrderWord { ORDER = 0, PASS = 1, END = 2, ROWS = 3, ORDER_WORDS = 4 };

struct alignas(128) ServedLayer {
  FusedParams layer;
};

struct ServedLane {
  LaneView view;    // its host words go on with the number of passes that were posted
  const u32* ring;  // pinned: a record a pass: base, address of its first served layer (two words each), number of layers, none, over (two)
};

struct ServerParams {
  ServedLane lanes[MAX_LANES];
  u64* order;       // device: ORDER_WORDS, zero at launch
  u64* meetings;    // device
  u64* control;     // pinned
  u64 launch;       // grows by one a launch
  i64 idle_ns;
  int num_lanes, ring_slots, record_words;
};

// A lane's pass under way; count 0: none.
struct LaneState {
  u64 base, since;
  u64 over;         // what the flag says where the run that the pass belongs to has ended; 0: it has begun the run
  const u64* flag;  // of its rows, in this rank's memory
  const ServedLayer* layers;
  int layer, count, is_ready;
};

struct ServerSmem {
  ServedLayer served;
  LaneState states[MAX_LANES];
  u64 order[ORDER_WORDS];  // this turn's
  int lane;                // block 0: whose pass goes on behind this turn
  int is_void;             // the turn's rows did not come
};
constexpr int SERVER_SMEM_BYTES = (sizeof(ServerSmem) + 127) / 128 * 128;

DEVICE u64 order_word(u32 turn, const ServedLayer* layer) {
  return static_cast<u64>(turn & 0x3fff) << 50 | reinterpret_cast<u64>(layer) >> 7;
}

// A lane without a pass takes the next one that was posted.
DEVICE void take_pass(const ServerParams& p, const ServedLane& lane, LaneState& s) {
  const u64 cursor = lane.view.lane[CURSOR];
  if (load_acquire(lane.view.host + POSTED) <= cursor) return;
  const u32* record = lane.ring + static_cast<i64>(cursor % p.ring_slots) * p.record_words;
  u64 words[2];
  for (int i = 0; i < 2; ++i)
    words[i] = static_cast<u64>(load_relaxed(record + 2 * i)) | static_cast<u64>(load_relaxed(record + 2 * i + 1)) << 32;
  s.base = words[0];
  s.layers = reinterpret_cast<const ServedLayer*>(words[1]);
  s.count = static_cast<int>(load_relaxed(record + 4));
  s.over = static_cast<u64>(load_relaxed(record + 6)) | static_cast<u64>(load_relaxed(record + 7)) << 32;
  s.flag = s.layers->layer.route.arrival.flags.flag[0];
  s.layer = 0, s.is_ready = 0, s.since = timer_ns();
  lane.view.lane[CURSOR] = cursor + 1;
}

// End a pass that cannot go on.
DEVICE void end_early(const ServedLane& lane, LaneState& s, bool is_late) {
  if (is_late) store_release(lane.view.host + LATE, s.base + s.layer + 1);
  store_release(lane.view.host + DONE, s.base + s.count);
  s.count = 0;
}

// What warp 0 of block 0 does between two layers; lane l of the warp looks after lane l of the server.
struct Arbiter {
  const ServerParams& p;
  LaneState* states;
  int l;
  bool is_mine;

  DEVICE Arbiter(const ServerParams& p, LaneState* states)
      : p(p), states(states), l(threadIdx.x % 32), is_mine(l < p.num_lanes) {}

  DEVICE void look_at_flag() {
    LaneState& s = states[l];
    if (!is_mine || s.count == 0 || s.is_ready) return;
    const u64 want = s.base + s.layer + 1;
    if (p.lanes[l].view.deadline_ns >= 0 && load_relaxed(s.flag) < want) return;
    const u64 flag = load_acquire(s.flag);
    if (s.over != 0 && s.layer == 0 && flag >= s.over) return end_early(p.lanes[l], s, false);
    s.is_ready = 1, s.since = timer_ns();
  }
  // The host's words: new passes, passes it gave up, and waits that ran out.
  DEVICE void look_at_host() {
    LaneState& s = states[l];
    if (!is_mine) return;
    const ServedLane& lane = p.lanes[l];
    if (s.count == 0) return take_pass(p, lane, s);
    if (s.is_ready) return;
    if (load_relaxed(lane.view.host + ABORT) >= s.base) end_early(lane, s, true);
    else if (timer_ns() - s.since > static_cast<u64>(lane.view.deadline_ns)) end_early(lane, s, true);
  }
  // New passes alone, of lanes that have none: a look across the bus takes as long as a crossing.
  DEVICE void look_for_passes() {
    if (is_mine && states[l].count == 0) take_pass(p, p.lanes[l], states[l]);
  }
  // The lane that has been ready longest; -1: none.
  DEVICE int oldest_ready() const {
    const bool ready = is_mine && states[l].count > 0 && states[l].is_ready;
    const u64 age = ready ? timer_ns() - states[l].since : 0;
    const u32 key = ready ? static_cast<u32>(age < 0x3ffffffu ? age : 0x3ffffffu) << 5 | (31 - l) | 1u << 31 : 0;
    const u32 best = warp_max_u32(key);
    return best == 0 ? -1 : 31 - static_cast<int>(best & 31);
  }
  DEVICE bool has_pass() const { return warp_max_u32(is_mine && states[l].count > 0) != 0; }

  // The lane in the middle of the only pass under way; -1: none, or several.
  DEVICE int only_one() const {
    const bool has_pass = is_mine && states[l].count > 0;
    const u32 key = has_pass ? (31 - l) << 1 | (states[l].layer > 0) : 0, best = warp_max_u32(has_pass ? key | 64 : 0);
    const u32 least = ~warp_max_u32(has_pass ? ~(key | 64) : 0);
    return best != 0 && best == least && best & 1 ? 31 - static_cast<int>(best >> 1 & 31) : -1;
  }

  // Publish this turn's layer: the one whose rows came first, or that of a lone pass, whose rows every block awaits itself.
  // Where no pass is under way the server waits for one, or leaves and publishes that.
  DEVICE void publish_next(u32 turn, ServerSmem& s) {
    if (s.is_void && l == s.lane && states[l].count > 0) end_early(p.lanes[l], states[l], false);
    warp_sync();
    if (turn % TURNS == 0) {
      look_for_passes();
      warp_sync();
    }
    u64 idle_since = timer_ns();
    for (u32 looks = 0;; ++looks) {
      look_at_flag();
      warp_sync();
      const int ready = oldest_ready(), chosen = ready >= 0 ? ready : only_one();
      if (chosen >= 0) {
        if (l == chosen) {
          const bool is_last = publish(turn, ready >= 0);
          s.lane = is_last ? NO_LANE : l;
          if (is_last) take_pass(p, p.lanes[l], states[l]);  // while others work: a lane waits for no other's pass
        }
        return;
      }
      if (!has_pass()) {
        look_at_host();
        warp_sync();
        if (has_pass()) {
          idle_since = timer_ns();
        } else if (may_leave(idle_since)) {
          if (l == 0) store_release_device(p.order + ORDER, order_word(turn, nullptr));
          return;
        }
      } else if (looks % LOOKS == LOOKS - 1) {
        look_at_host();
        warp_sync();
      }
    }
  }
  // Whether it is the last layer of its pass.
  DEVICE bool publish(u32 turn, bool rows_are_there) {
    LaneState& s = states[l];
    const bool is_last = s.layer + 1 == s.count;
    p.order[PASS] = s.base;
    p.order[ROWS] = rows_are_there ? 0 : s.base + s.layer + 1;
    p.order[END] = is_last ? s.base + s.count : 0;
    store_release_device(p.order + ORDER, order_word(turn, s.layers + s.layer));
    s.is_ready = 0;
    s.since = timer_ns();
    if (is_last) s.count = 0;
    else ++s.layer;
    return is_last;
  }
  // Asked to, or idle for too long; a pass that is posted meanwhile is not left behind.
  DEVICE bool may_leave(u64 idle_since) {
    const bool asked = load_relaxed(p.control + STOP) >= p.launch;
    if (!asked && timer_ns() - idle_since < static_cast<u64>(p.idle_ns)) {
      pause_ns(200);
      return false;
    }
    if (asked) return true;  // the host posts nothing before the next launch
    if (l == 0) store_release(p.control + LEFT, p.launch);
    system_fence();
    warp_sync();
    look_at_host();
    warp_sync();
    if (!has_pass()) return true;
    if (l == 0) store_release(p.control + LEFT, p.launch - 1);
    return false;
  }
};

// The last block to end raises the flags behind the sums, and tells the host of the end of a pass.
DEVICE void end_layer(const Departure& departure, u64 base, u64 end) {
  if (departure.flags.count == 0 && end == 0) return;  // words need no flag
  block_sync();
  if (threadIdx.x != 0) return;
  const LaneView& v = departure.view;
  const bool is_void = has_failed(v, base);  // on its way during the fence
  system_fence();
  if (atomic_add(reinterpret_cast<int*>(v.lane + TICKET), 1) != static_cast<int>(gridDim.x) - 1) return;
  *reinterpret_cast<int*>(v.lane + TICKET) = 0;
  system_fence();
  for (int i = 0; i < departure.flags.count && !is_void; ++i)
    store_relaxed(departure.flags.flag[i], base + departure.layer + 1);
  if (end) store_release(v.host + DONE, end);
}

// Every thread of a block gets this turn's layer; null: the server leaves.
DEVICE const ServedLayer* await_turn(const ServerParams& p, ServerSmem& s, u32 turn) {
  if (blockIdx.x == 0 && threadIdx.x < 32) Arbiter(p, s.states).publish_next(turn, s);
  if (threadIdx.x == 0) {
    u64 word;
    while ((word = load_relaxed_device(p.order + ORDER)) >> 50 != (turn & 0x3fff)) spin();
    load_acquire_device(p.order + ORDER);
    s.order[ORDER] = word << 14 >> 7;  // without the turn, times 128
    s.order[PASS] = load_relaxed_device(p.order + PASS);
    s.order[END] = load_relaxed_device(p.order + END);
    s.order[ROWS] = load_relaxed_device(p.order + ROWS);
    s.is_void = 0;
  }
  block_sync();
  return reinterpret_cast<const ServedLayer*>(s.order[ORDER]);
}

// Every thread of a block waits for the rows of its turn, whose layer is in shared memory. Block 0 decides that they will not
// come; the others learn of it by FAILED, unless they have seen the rows. What follows is void: nobody is told of it.
DEVICE void await_rows(ServerSmem& s) {
  const u64 want = s.order[ROWS], base = s.order[PASS];
  if (want == 0) return;
  if (threadIdx.x == 0) {
    const LaneView& v = s.served.layer.route.arrival.view;
    const u64* flag = s.served.layer.route.arrival.flags.flag[0];
    const u64 start = timer_ns();
    u64 looked = start;
    for (bool is_there = v.deadline_ns < 0; !is_there;) {
      for (int i = 0; i < POLLS_PER_LOOK && !is_there; ++i) is_there = load_acquire(flag) >= want;
      if (is_there) break;
      if (has_failed(v, base)) {
        device_fence();  // before what tells the last block that this one has ended
        s.is_void = 1;
        break;
      }
      spin();
      if (blockIdx.x != 0) continue;
      const u64 now = timer_ns();
      if (now - start > static_cast<u64>(v.deadline_ns)) expire(v, base, want, 0);
      if (now - looked < ABORT_LOOK_NS) continue;
      looked = now;
      if (load_relaxed(v.host + ABORT) >= base) expire(v, base, want, 0);
    }
  }
  block_sync();
}

// What probably follows: the next layer of the same pass or, where two lanes alternate, of the one before.
struct Guess {
  const ServedLayer *last = nullptr, *before = nullptr;  // what would follow the last turn, and the one before it
  DEVICE const ServedLayer* next() const { return before != nullptr ? before : last; }
  DEVICE void turn(const ServedLayer* layer, bool is_last_of_pass) {
    before = layer == last ? nullptr : last;
    last = is_last_of_pass ? nullptr : layer + 1;
  }
};

// This turn's layer, which is in shared memory. Not `is_known`: a guess, which ends where the turn orders another one.
// Returns the one that the turn orders.
template <bool FEW>
DEVICE const ServedLayer* serve(const ServerParams& p, ServerSmem& s, GridMeeting& meeting, u32 turn, const ServedLayer* layer,
                                bool is_known) {
  FusedLayer<FEW> work(s.served.layer, dynamic_smem() + SERVER_SMEM_BYTES);
  if (!is_known) {  // what no row decides is on its way meanwhile
    work.load_shared();
    const ServedLayer* ordered = await_turn(p, s, turn);
    if (ordered != layer) {
      copy_async_wait<0>();
      block_sync();
      return ordered;
    }
  }
  await_rows(s);
  const u64 base = s.order[PASS];
  // As `has_failed`, but on its way until the sums are there. Also where this block has found the rows: what it takes from
  // blocks that gave up is void.
  const u64 failed = load_relaxed(s.served.layer.route.arrival.view.lane + FAILED);
  work.run(meeting, base, [&] {
    return failed / STEP == base / STEP ? VOID_EPOCH : word_epoch(base, s.served.layer.moe.departure.layer);
  });
  return layer;
}

KERNEL(ffn_server, ServerParams, MOE_THREADS, 1) {
  ServerSmem& s = *reinterpret_cast<ServerSmem*>(dynamic_smem());
  GridMeeting meeting(p.meetings);
  Guess guess;
  if (blockIdx.x == 0 && threadIdx.x < MAX_LANES) s.states[threadIdx.x].count = 0;
  if (threadIdx.x == 0) s.is_void = 0;
  block_sync();
  for (u32 turn = 1;; ++turn) {
    const ServedLayer *layer = guess.next(), *ordered = layer;
    bool is_known = layer == nullptr;
    if (is_known) ordered = await_turn(p, s, turn);
    do {
      layer = ordered;
      if (layer == nullptr) return;
      for (int i = threadIdx.x; i < static_cast<int>(sizeof(ServedLayer) / 16); i += MOE_THREADS)
        reinterpret_cast<uint4*>(&s.served)[i] = load16(reinterpret_cast<const uint4*>(layer) + i);
      block_sync();
      ordered = is_few(s.served.layer) ? serve<true>(p, s, meeting, turn, layer, is_known)
                                       : serve<false>(p, s, meeting, turn, layer, is_known);
      is_known = true;
    } while (ordered != layer);
    end_layer(s.served.layer.moe.departure, s.order[PASS], s.order[END]);
    guess.turn(layer, s.order[END] != 0);
    block_sync();  // the next turn overwrites what this one reads
  }
}
