// A ring of shared-memory stages that one producer warp fills with bulk copies while the other warps compute (sm_90).
//
// The copy engine keeps every stage in flight without holding registers, so device memory is read at full rate however
// long a consumer takes. A row of a stage is one contiguous copy; rows are padded by 64 bytes, so that a warp's 16-byte
// reads of eight rows meet no bank twice.
#pragma once
#include "common.cuh"

constexpr int RING_CONSUMERS = 8;                       // warps
constexpr int RING_THREADS = (RING_CONSUMERS + 1) * 32; // the last warp produces
constexpr int RING_ROWS = 16;
constexpr int RING_PADDING = 64;

template <int STAGES, int ROW_BYTES>
struct Ring {
  static constexpr int STRIDE = ROW_BYTES + RING_PADDING;
  static constexpr int BYTES = STAGES * RING_ROWS * STRIDE + STAGES * 16;
  static_assert(STRIDE % 128 == RING_PADDING && ROW_BYTES % 128 == 0, "banks");
  u8* stages;
  u64 *full, *empty;
  int stage = 0;
  u32 phase = 0;

  // All threads; a block_sync must follow before anyone uses the ring.
  DEVICE explicit Ring(u8* smem) : stages(smem) {
    full = reinterpret_cast<u64*>(smem + STAGES * RING_ROWS * STRIDE);
    empty = full + STAGES;
    if (threadIdx.x == 0) {
      for (int s = 0; s < STAGES; ++s) {
        barrier_init(full + s, 1);
        barrier_init(empty + s, RING_CONSUMERS);
      }
      barrier_init_fence();
    }
  }
  DEVICE void advance() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
  // Producer warp: lane r < 16 passes row r's source; `bytes` of each row, a multiple of 16.
  DEVICE void fill(const void* row, int bytes) {
    const int lane = threadIdx.x % 32;
    barrier_wait(empty + stage, phase ^ 1);
    if (lane == 0) barrier_arrive_expect(full + stage, bytes * RING_ROWS);
    warp_sync();
    if (lane < RING_ROWS) copy_bulk(stages + (stage * RING_ROWS + lane) * STRIDE, row, bytes, full + stage);
    advance();
  }
  // Consumers: this lane's 16-byte reads of rows g and g + 8 start here, plus 64 bytes a chunk.
  DEVICE const u8* wait_full() const {
    barrier_wait(full + stage, phase);
    return stages + (stage * RING_ROWS + threadIdx.x % 32 / 4) * STRIDE + threadIdx.x % 4 * 16;
  }
  DEVICE void release() {
    warp_sync();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + stage);
    advance();
  }
};
