// Where a choice finds a token's logits: as an earlier kernel left them, or as words that other blocks write meanwhile.
#pragma once
#include "system.cuh"

// Logits that an earlier kernel, or this one before a fence, left in device memory. A lane looks after PER_LANE neighbours.
struct LogitRow {
  const float* row;
  template <int PER_LANE>
  struct Look {
    float logits[PER_LANE];
  };
  template <int PER_LANE>
  DEVICE Look<PER_LANE> look(int experts) const {
    Look<PER_LANE> seen;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {  // all loads before the first use
      const int e = threadIdx.x % 32 * PER_LANE + i;
      seen.logits[i] = e < experts ? load_float_l2(row + e) : 0.0f;
    }
    return seen;
  }
  template <int PER_LANE>
  DEVICE void read(const Look<PER_LANE>& seen, float (&held)[PER_LANE], int experts) const {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      if (static_cast<int>(threadIdx.x % 32) * PER_LANE + i < experts) held[i] = seen.logits[i];
  }
};

// Logits that other blocks write meanwhile: each word holds a value and the launch's epoch, so that one look finds both.
struct LogitWords {
  const u64* row;
  u32 epoch;
  template <int PER_LANE>
  struct Look {
    u64 words[PER_LANE];
  };
  static DEVICE u64 word(float value, u32 epoch) { return static_cast<u64>(epoch) << 32 | bits_of_float(value); }
  template <int PER_LANE>
  DEVICE Look<PER_LANE> look(int experts) const {
    Look<PER_LANE> seen;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int e = threadIdx.x % 32 * PER_LANE + i;
      seen.words[i] = e < experts ? load_relaxed_device(row + e) : word(0.0f, epoch);
    }
    return seen;
  }
  // Looks again until all are there.
  template <int PER_LANE>
  DEVICE void read(Look<PER_LANE> seen, float (&held)[PER_LANE], int experts) const {
    while (true) {
      bool is_whole = true;
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) is_whole = is_whole && static_cast<u32>(seen.words[i] >> 32) == epoch;
      if (is_whole) break;
      spin();
      seen = look<PER_LANE>(experts);
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      if (static_cast<int>(threadIdx.x % 32) * PER_LANE + i < experts)
        held[i] = float_of_bits(static_cast<u32>(seen.words[i]));
  }
};
