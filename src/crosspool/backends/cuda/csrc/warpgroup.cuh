// Products of a warpgroup (four warps) whose operands lie in shared memory: compute capability 9.0 alone has them.
//
// Shared memory is cut into panels of 128-byte rows, 1,024-byte aligned; the 16-byte pieces of a row are exchanged by its
// number (`panel_piece`), so that neither way of reading meets bank conflicts.
#pragma once
#include "bulk.cuh"

constexpr int PANEL_ROW = 128;                   // bytes
constexpr int PANEL_ELEMENTS = PANEL_ROW / 2;
constexpr int PANEL_GROUP = 8 * PANEL_ROW;       // eight rows, within which pieces are exchanged

// Where 16-byte piece `piece` (0..7) of a panel's row lies, in bytes from the panel's start.
DEVICE int panel_piece(int row, int piece) { return row * PANEL_ROW + ((piece ^ row % 8) << 4); }

// Rows of a layer's part of every frame, which the copy engine leaves as panels: as the driver encodes them.
struct alignas(64) PanelMap { u64 words[16]; };

#if defined(CROSSPOOL_EMULATOR)
DEVICE void expect_map(const PanelMap&) {}
// Here the words say plainly: address of frame 0's first row, bytes of a row and of a frame, panels, rows of a copy.
DEVICE void copy_panels(const PanelMap& map, u8* to, int row, int frame, const BulkArrival& arrival) {
  const u64* w = map.words;
  for (u64 r = 0; r < w[4]; ++r)
    for (u64 piece = 0; piece < w[3] * 8; ++piece)
      arrival.copy(to + piece / 8 * w[4] * PANEL_ROW + panel_piece(r, piece % 8),
                   reinterpret_cast<const u8*>(w[0]) + frame * w[2] + (row + r) * w[1] + piece * 16, 16);
}
struct PanelOperand { const u8* at; int group; };
DEVICE PanelOperand panel_operand(const u8* p, int group) { return PanelOperand{p, group}; }
DEVICE PanelOperand operand_at(PanelOperand operand, int bytes) { return PanelOperand{operand.at + bytes, operand.group}; }
// d (64 x N) = a (64 x 16) * b (16 x N) (+ d). a's rows are panel rows, from 16 elements at `a`; or, ACROSS, its columns are
// panel rows, 64 elements of 16 rows at `a`. b's columns are panel rows. Lane l of warp w: c % 4 < 2 row 16 w + l / 4,
// else that plus 8; column c / 4 * 8 + l % 4 * 2 + c % 2.
template <int N, bool ACROSS>
DEVICE void warpgroup_mma(float (&d)[N / 8][4], PanelOperand a, PanelOperand b, bool adds) {
  auto element = [](PanelOperand from, int row, int byte) {
    const u64 plain = reinterpret_cast<u64>(from.at) + row / 8 * from.group + row % 8 * PANEL_ROW + byte;
    const u64 at = (plain & ~0x7full) | ((plain ^ (plain >> 3 & 0x70)) & 0x7f);
    return bf16_value(*reinterpret_cast<const u16*>(at));
  };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  for (int n = 0; n < N / 8; ++n)
    for (int c = 0; c < 4; ++c) {
      const int row = warp * 16 + lane / 4 + c / 2 * 8, column = n * 8 + lane % 4 * 2 + c % 2;
      float sum = adds ? d[n][c] : 0.0f;
      for (int k = 0; k < 16; ++k)
        sum += (ACROSS ? element(a, k, row * 2) : element(a, row, k * 2)) * element(b, column, k * 2);
      d[n][c] = sum;
    }
}
template <int TILES>
DEVICE void warpgroup_begin(float (&)[TILES][4]) {}
template <int TILES>
DEVICE void warpgroup_end(float (&)[TILES][4]) {}
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
// One thread: the map will be used; its first use takes it from memory.
DEVICE void expect_map(const PanelMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
// One thread: rows from `row` on of a frame to the panels at `to`.
DEVICE void copy_panels(const PanelMap& map, u8* to, int row, int frame, const BulkArrival& arrival) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
          static_cast<u32>(__cvta_generic_to_shared(to))),
      "l"(&map), "r"(0), "r"(row), "r"(0), "r"(frame), "r"(arrival.at())
      : "memory");
}
// What the unit takes for rows of 128 bytes, exchanged, in groups of eight that lie `group` bytes apart.
typedef u64 PanelOperand;
DEVICE PanelOperand operand_at(PanelOperand operand, int bytes) { return operand + (bytes >> 4); }
DEVICE PanelOperand panel_operand(const u8* p, int group) {
  const u64 at = static_cast<u32>(__cvta_generic_to_shared(p));
  constexpr u64 EXCHANGED_128 = 1;
  return (at >> 4 & 0x3fff) | (u64{1} << 16) | (static_cast<u64>(group >> 4) << 32) | (EXCHANGED_128 << 62);
}
template <int N, bool ACROSS>
DEVICE void warpgroup_mma(float (&d)[N / 8][4], PanelOperand left, PanelOperand right, bool adds) {
  static_assert(N == 16 || N == 24, "instances");
  if constexpr (N == 16)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1, %11, 0; }"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
          "+f"(d[1][3])
        : "l"(left), "l"(right), "r"(static_cast<int>(adds)), "n"(ACROSS ? 1 : 0));
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %14, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11}, %12, %13, p, 1, 1, "
        "%15, 0; }"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
          "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3])
        : "l"(left), "l"(right), "r"(static_cast<int>(adds)), "n"(ACROSS ? 1 : 0));
}
// Around a row of products onto `d`: what wrote it before comes first, and what reads it comes behind.
template <int TILES>
DEVICE void warpgroup_hold(float (&d)[TILES][4]) {
#pragma unroll
  for (int n = 0; n < TILES; ++n)
    asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}
template <int TILES>
DEVICE void warpgroup_begin(float (&d)[TILES][4]) {
  warpgroup_hold(d);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
template <int TILES>
DEVICE void warpgroup_end(float (&d)[TILES][4]) {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  warpgroup_hold(d);
}
#else
typedef u64 PanelOperand;
DEVICE void expect_map(const PanelMap&) {}
DEVICE PanelOperand panel_operand(const u8*, int) { return 0; }
DEVICE PanelOperand operand_at(PanelOperand operand, int) { return operand; }
DEVICE void copy_panels(const PanelMap&, u8*, int, int, const BulkArrival&) {}
template <int N, bool ACROSS>
DEVICE void warpgroup_mma(float (&)[N / 8][4], PanelOperand, PanelOperand, bool) {}  // never launched there
template <int TILES>
DEVICE void warpgroup_begin(float (&)[TILES][4]) {}
template <int TILES>
DEVICE void warpgroup_end(float (&)[TILES][4]) {}
#endif
