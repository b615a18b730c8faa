// Draws one token of each row from its logits: temperature, then min-p, top-k and top-p as cuts of the ranking (equal
// weights by token id), then the first token, in id order, whose cumulative weight exceeds the row's random number.
//
// One block a row. A cut is a threshold on the bits of the weights, which are not negative and so ordered as integers; it is
// found by bisection. Sums are double precision. Rows with temperature 0 keep the token that they have.
#include "common.cuh"

constexpr int SAMPLE_WARPS = 32, SAMPLE_THREADS = SAMPLE_WARPS * 32;
constexpr u32 ONE_BITS = 0x3f800000;  // of 1.0f, the largest weight

struct SampleRow {
  double temperature, min_p, top_p;
  int top_k;
  u32 random;  // of 2^32
};

struct SampleParams {
  float* logits;          // (rows, vocab); sampled rows' become weights
  const SampleRow* rows;
  int* tokens;            // (rows): the best tokens; sampled rows' are replaced
  int vocab;
};

DEVICE double shfl_xor_double(double v, int mask) {
  union { double d; u64 u; } bits;
  bits.d = v;
  bits.u = shfl(bits.u, (threadIdx.x % 32) ^ mask);
  return bits.d;
}
DEVICE double shfl_double(double v, int lane) {
  union { double d; u64 u; } bits;
  bits.d = v;
  bits.u = shfl(bits.u, lane);
  return bits.d;
}
DEVICE double warp_sum_double(double v) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) v += shfl_xor_double(v, mask);
  return v;
}
// Every thread gets the sum; `scratch` holds SAMPLE_WARPS doubles.
DEVICE double block_sum_double(double v, double* scratch) {
  v = warp_sum_double(v);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  block_sync();
  double total = 0.0;
  for (int w = 0; w < SAMPLE_WARPS; ++w) total += scratch[w];
  block_sync();
  return total;
}

// The tokens that the cuts so far leave: weights above the threshold, and those at it up to token `last`.
struct Kept {
  const float* weights;
  int vocab;
  u32 threshold;
  int last;

  DEVICE bool holds(int id) const {
    const u32 bits = bits_of_float(weights[id]);
    return bits > threshold || (bits == threshold && id <= last);
  }
  // Number, or mass, of the kept tokens with at least these bits.
  DEVICE double tally(u32 bits, bool of_mass, double* scratch) const {
    double sum = 0.0;
    for (int id = threadIdx.x; id < vocab; id += SAMPLE_THREADS) {
      const float w = weights[id];
      if (bits_of_float(w) >= bits && holds(id)) sum += of_mass ? static_cast<double>(w) : 1.0;
    }
    return block_sum_double(sum, scratch);
  }
  // The largest bits whose tally is at least `wanted`; that of the threshold is.
  DEVICE u32 bisect(double wanted, bool of_mass, double* scratch) const {
    u32 low = threshold, high = ONE_BITS + 1;
    while (high - low > 1) {
      const u32 middle = low + (high - low) / 2;
      if (tally(middle, of_mass, scratch) >= wanted) low = middle;
      else high = middle;
    }
    return low;
  }
  // The first token, in id order, at which the running sum exceeds `target`, or -1. Sums weights of kept tokens, or
  // counts kept tokens whose bits are `only`.
  DEVICE int find(double target, u32 only, double* scratch, int* answer) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int segment = ceil_div(ceil_div(vocab, SAMPLE_WARPS), 32) * 32, begin = warp * segment;
    auto quantity = [&](int id) -> double {
      if (id >= vocab || !holds(id)) return 0.0;
      if (only == 0) return static_cast<double>(weights[id]);
      return bits_of_float(weights[id]) == only ? 1.0 : 0.0;
    };
    double sum = 0.0;
    for (int i = lane; i < segment; i += 32) sum += quantity(begin + i);
    sum = warp_sum_double(sum);
    if (threadIdx.x == 0) *answer = -1;
    if (lane == 0) scratch[warp] = sum;
    block_sync();
    int chosen = -1;
    double before = 0.0;
    for (int w = 0; w < SAMPLE_WARPS && chosen < 0; ++w) {
      if (before + scratch[w] > target) chosen = w;
      else before += scratch[w];
    }
    if (warp == chosen) {
      int found = -1;
      for (int i = 0; i < segment && found < 0; i += 32) {
        double running = quantity(begin + i + lane);
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {  // inclusive sum over the lanes
          const double other = shfl_double(running, lane >= step ? lane - step : lane);
          if (lane >= step) running += other;
        }
        int first = before + running > target ? lane : 32;
#pragma unroll
        for (int mask = 16; mask; mask >>= 1) first = min_int(first, shfl_xor(first, mask));
        if (first < 32) found = begin + i + first;
        before += shfl_double(running, 31);
      }
      if (lane == 0) *answer = found;
    }
    block_sync();
    const int result = *answer;
    block_sync();
    return result;
  }
  // Keep `count` of the tokens at these bits, the lowest ids, and all above.
  DEVICE void cut(u32 bits, double count, double* scratch, int* answer) {
    const int tie = find(count - 0.5, bits, scratch, answer);
    if (tie >= 0) last = bits == threshold ? min_int(last, tie) : tie;
    else if (bits != threshold) last = vocab;
    threshold = bits;
  }
};

KERNEL(sample_rows, SampleParams, SAMPLE_THREADS, 1) {
  double* scratch = reinterpret_cast<double*>(dynamic_smem());  // SAMPLE_WARPS
  int* answer = reinterpret_cast<int*>(scratch + SAMPLE_WARPS);
  float* tops = reinterpret_cast<float*>(answer + 2);           // SAMPLE_WARPS
  grid_launch_dependents();
  grid_wait();
  const SampleRow row = p.rows[blockIdx.x];
  if (!(row.temperature > 0.0)) return;
  float* weights = p.logits + static_cast<i64>(blockIdx.x) * p.vocab;
  float top = -__builtin_huge_valf();
  for (int id = threadIdx.x; id < p.vocab; id += SAMPLE_THREADS) top = fmaxf(top, weights[id]);
  top = warp_max(top);
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
  block_sync();
  for (int w = 0; w < SAMPLE_WARPS; ++w) top = fmaxf(top, tops[w]);
  double sum = 0.0;
  for (int id = threadIdx.x; id < p.vocab; id += SAMPLE_THREADS) {
    const float w = static_cast<float>(exp((static_cast<double>(weights[id]) - top) / row.temperature));
    weights[id] = w;
    sum += w;
  }
  sum = block_sum_double(sum, scratch);
  if (!(sum >= 1.0 && sum < 1e30)) return;  // no distribution: the best token stays

  Kept kept{weights, p.vocab, 1, p.vocab};  // bits 0: weights that underflowed
  if (row.min_p > 0.0) {
    const double least = row.min_p < 1.0 ? row.min_p : 1.0;
    const float rounded = static_cast<float>(least);
    kept.threshold = bits_of_float(rounded) + (static_cast<double>(rounded) < least ? 1 : 0);
    if (kept.threshold > ONE_BITS) kept.threshold = ONE_BITS;
  }
  if (row.top_k > 0 && row.top_k < p.vocab && kept.tally(kept.threshold, false, scratch) > row.top_k) {
    const u32 bits = kept.bisect(row.top_k, false, scratch);
    const double above = bits == ONE_BITS ? 0.0 : kept.tally(bits + 1, false, scratch);
    kept.cut(bits, row.top_k - above, scratch, answer);
  }
  if (row.top_p < 1.0) {
    const double wanted = row.top_p * kept.tally(kept.threshold, true, scratch);
    const u32 bits = kept.bisect(wanted, true, scratch);
    const double above = bits == ONE_BITS ? 0.0 : kept.tally(bits + 1, true, scratch);
    const double needed = (wanted - above) / float_of_bits(bits);
    double count = static_cast<double>(static_cast<i64>(needed));
    if (count < needed || count < 1.0) count += 1.0;
    kept.cut(bits, count, scratch, answer);
  }
  const double total = kept.tally(kept.threshold, true, scratch);
  const double uniform = (static_cast<double>(row.random) + 0.5) / 4294967296.0;
  const int token = kept.find(uniform * total, 0, scratch, answer);
  if (threadIdx.x == 0 && token >= 0) p.tokens[blockIdx.x] = token;
}
