// Stands where attention would be, in measurements and stress tests of the FFN side: sends rows, waits for the sums, and
// so on, layer after layer and pass after pass, with nothing between.
#include "crossing.cuh"

constexpr int BLOCK = 512;
constexpr int CLIENT_RANKS = 4;

struct ClientParams {
  LaneView view;
  Flags flags;                            // in the weights ranks' memory
  Flags answers;                          // in this rank's memory
  u8* slots[2][CLIENT_RANKS];             // the weights ranks' rows, by layer parity: (tokens, hidden) bf16
  const float* sums[2][CLIENT_RANKS];     // this rank's slots: (tokens, hidden) fp32
  const u8* rows;                         // (layers, row_bytes): what each layer of a pass sends: rows of bf16, then what
                                          // a router would add
  float* received;                        // (layers, tokens, hidden): the sums of the last pass, in rank order, or null
  const float* expected;                  // the same: what the sums of every pass have to be, bit for bit, or null
  u64* wrong;                             // how many sums were not
  u64* times;                             // (passes + 1): when each pass began, and the last one's end
  u64 first_base;                         // of the first pass; the next ones follow at STEP
  int passes, layers, row_bytes, values;  // row_bytes: of one layer; values: of one layer's sums
  unsigned pause_mask;                    // random pauses before a put: 0 none, else a mask of nanoseconds
  unsigned pause_ns;                      // what attention would take, before every put
  int are_words;                          // sums carry their epoch; else flags tell of them
};

// The first of this thread's elements, `each` at a time, and how many all threads take at once.
DEVICE int first_of(int each) { return (blockIdx.x * BLOCK + threadIdx.x) * each; }
DEVICE int all_take(int each) { return gridDim.x * BLOCK * each; }

// Every thread looks at its part of the layer's words until they are whole.
DEVICE void await_words(const ClientParams& p, u64 base, int layer) {
  const u32 epoch = word_epoch(base, layer);
  for (int rank = 0; rank < p.answers.count; ++rank) {
    WordWait wait(p.view, base, layer, rank);
    for (int i = first_of(2); i < p.values; i += all_take(2)) {
      uint4 words;
      do words = load_words(p.sums[layer & 1][rank] + 2 * i);
      while ((words.y != epoch || words.w != epoch) && !wait.is_over());
    }
  }
}

KERNEL(ffn_client, ClientParams, BLOCK, 1) {
  u32 random = 12345;
  for (int pass = 0; pass < p.passes; ++pass) {
    const u64 base = p.first_base + static_cast<u64>(pass) * STEP;
    if (first_of(1) == 0) p.times[pass] = timer_ns();
    for (int layer = 0; layer < p.layers; ++layer) {
      if (p.pause_mask || p.pause_ns) {
        random = random * 1664525u + 1013904223u;
        const u64 until = timer_ns() + p.pause_ns + (random >> 8 & p.pause_mask);
        while (timer_ns() < until) {}
      }
      const u8* from = p.rows + static_cast<i64>(layer) * p.row_bytes;
      for (int i = first_of(16); i < p.row_bytes; i += all_take(16)) {
        const uint4 value = load16(from + i);
        for (int rank = 0; rank < p.flags.count; ++rank) store16(p.slots[layer & 1][rank] + i, value);
      }
      raise(p.view, p.flags, base, layer, gridDim.x);
      if (p.are_words) await_words(p, base, layer);
      else await(p.view, p.answers, base, layer);
      block_sync();
      const bool keeps = p.received != nullptr && pass == p.passes - 1;
      if (keeps || p.expected != nullptr) {
        for (int i = first_of(2); i < p.values; i += all_take(2)) {  // those that this thread waited for
          for (int j = i; j < i + 2; ++j) {
            float sum = 0.0f;
            for (int rank = 0; rank < p.answers.count; ++rank)
              sum += load_float_l2(p.sums[layer & 1][rank] + (p.are_words ? 2 * j : j));
            const i64 at = static_cast<i64>(layer) * p.values + j;
            if (keeps) p.received[at] = sum;
            if (p.expected != nullptr && bits_of_float(sum) != bits_of_float(p.expected[at])) atomic_add(p.wrong, 1);
          }
        }
        block_sync();
      }
    }
  }
  if (first_of(1) == 0) p.times[p.passes] = timer_ns();
}
