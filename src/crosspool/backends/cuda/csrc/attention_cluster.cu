// Decode attention as one kernel: the blocks of a cluster take neighbouring splits of a token's slots and merge them through
// each other's shared memory, each block a part of the values. Where several clusters share a token, each leaves its
// part in device memory and the last one to do so merges; clusters without slots end at once.
#include "attention_block.cuh"
#include "cluster.cuh"

constexpr int MAX_CLUSTER = 8;
constexpr int MAX_CLUSTERS = 32;  // of one token and group of heads

// Of one part and head: maximum (log2 domain) and sum.
struct Weight {
  float most, sum;
};

template <class Block>
struct Merge {
  static constexpr int COLS = Block::COLS, VALUE = Block::VALUE, ROW = VALUE + 4;  // floats; the padding spreads banks
  static constexpr int THREADS = Block::THREADS;
  static_assert(COLS * ROW * 4 <= Block::OFF_Q, "values lie where the tiles were");
  static_assert((4 + 2 * MAX_CLUSTERS) * COLS * 4 + 16 <= Block::WORK_BYTES, "what is merged lies where the scores were");
  static_assert(COLS <= THREADS, "a thread a head");

  const Block& block;
  float* o;        // (COLS, ROW): this block's values
  Weight* mine;    // (COLS): its weights
  Weight* total;   // (COLS): of all parts
  Weight* parts;   // (parts, COLS); `most` becomes the factor of the part's values
  int* is_last;

  DEVICE explicit Merge(const Block& block) : block(block) {
    o = reinterpret_cast<float*>(block.smem);
    mine = reinterpret_cast<Weight*>(block.smem + Block::OFF_S);
    total = mine + COLS;
    parts = total + COLS;
    is_last = reinterpret_cast<int*>(parts + MAX_CLUSTERS * COLS);
  }

  // This block's sums to where the cluster sees them.
  DEVICE void publish(const typename Block::Sums& s) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    block_sync();  // all are done with the tiles
#pragma unroll
    for (int j = 0; j < Block::HEADS; ++j)
      if (lane == 0) mine[warp + j * (THREADS / 32)] = Weight{s.m[j], s.l[j]};
    if (block.tiles == 0) return;
#pragma unroll
    for (int n = 0; n < Block::V_HEADS; ++n)
#pragma unroll
      for (int i = 0; i < Block::V_TILES; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) o[Block::head_of(n, c) * ROW + Block::value_of(i, c)] = s.o[i][n][c];
  }

  // `parts` and `total` from `weight(part, head)`.
  template <class Get>
  DEVICE void weigh(int count, const Get& weight) const {
    for (int i = threadIdx.x; i < count * COLS; i += THREADS) parts[i] = weight(i / COLS, i % COLS);
    block_sync();
    const int h = threadIdx.x;
    if (h < COLS) {
      float most = NEG_INF, sum = 0.0f;
      for (int part = 0; part < count; ++part) most = fmaxf(most, parts[part * COLS + h].most);
      for (int part = 0; part < count; ++part) {
        Weight& w = parts[part * COLS + h];
        w.most = w.sum > 0.0f ? exp2_fast(w.most - most) : 0.0f;  // 0: a part without slots, which has no values
        sum += w.most * w.sum;
      }
      total[h] = Weight{most, sum};
    }
    block_sync();
  }

  // Four merged values of a head from `values(part)`.
  template <class Values>
  DEVICE float4 add(int count, int h, const Values& values) const {
    float4 acc = float4{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (int part = 0; part < count; ++part) {
      const float w = parts[part * COLS + h].most;
      if (w == 0.0f) continue;
      const float4 v = values(part);
      acc.x += w * v.x, acc.y += w * v.y, acc.z += w * v.z, acc.w += w * v.w;
    }
    return acc;
  }

  DEVICE void store(int h, int d, float4 v) const {
    const AttentionParams& p = block.p;
    const float top = total[h].most;
    float sum = total[h].sum, scale = 1.0f;
    if (p.sinks != nullptr) {
      const float sink = bf16_value(p.sinks[block.head0 + h]) * 1.4426950408889634f, next = fmaxf(top, sink);
      scale = top == NEG_INF ? 0.0f : exp2_fast(top - next);
      sum = sum * scale + exp2_fast(sink - next);
    }
    scale = sum > 0.0f ? scale / sum : 0.0f;
    const uint2 packed = uint2{pack_bf16(v.x * scale, v.y * scale), pack_bf16(v.z * scale, v.w * scale)};
    *reinterpret_cast<uint2*>(p.out + (block.token * p.heads + block.head0 + h) * VALUE + d) = packed;
  }

  DEVICE void run(const typename Block::Sums& s) const {
    const AttentionParams& p = block.p;
    const int size = cluster_size(), rank = cluster_rank(), clusters = p.splits / size, cluster = blockIdx.x / size;
    const int length = p.lengths[block.token], slots = COLS * VALUE / 4, share = ceil_div(slots, size);
    const int first = rank * share, last = min_int(first + share, min_int(slots, block.heads_here * VALUE / 4));
    int active = 1;  // clusters with slots
    while (active < clusters && split_range(p, length, active * size, Block::SLOTS).begin < length) ++active;

    publish(s);
    cluster_arrive();
    cluster_wait();
    weigh(size, [&](int part, int h) {
      return Weight{load_float_of(&mine[h].most, part), load_float_of(&mine[h].sum, part)};
    });
    const auto part_row = [&](int part) { return (block.token * clusters + part) * p.heads + block.head0; };
    for (int i = first + threadIdx.x; i < last; i += THREADS) {
      const int h = i * 4 / VALUE, d = i * 4 % VALUE;
      const float4 v = add(size, h, [&](int part) { return load_float4_of(o + h * ROW + d, part); });
      if (active == 1) store(h, d, v);
      else *reinterpret_cast<float4*>(p.partial_o + (part_row(cluster) + h) * VALUE + d) = v;
    }
    cluster_arrive();
    if (active > 1) {
      // Every rank keeps its own copy of its cluster's weights, (tokens, clusters, ranks, heads): its ticket covers them.
      const auto weight_at = [&](int part, int h) {
        return p.partial_ml + (((block.token * clusters + part) * size + rank) * p.heads + block.head0 + h) * 2;
      };
      if (static_cast<int>(threadIdx.x) < block.heads_here) {
        weight_at(cluster, threadIdx.x)[0] = total[threadIdx.x].most;
        weight_at(cluster, threadIdx.x)[1] = total[threadIdx.x].sum;
      }
      if (is_last_of(active, p.tickets + (block.token * gridDim.y + blockIdx.y) * size + rank)) {
        weigh(active, [&](int part, int h) {
          if (h >= block.heads_here) return Weight{NEG_INF, 0.0f};
          return Weight{load_float_l2(weight_at(part, h)), load_float_l2(weight_at(part, h) + 1)};
        });
        for (int i = first + threadIdx.x; i < last; i += THREADS) {
          const int h = i * 4 / VALUE, d = i * 4 % VALUE;
          store(h, d, add(active, h, [&](int part) {
            return load_float4_l2(p.partial_o + (part_row(part) + h) * VALUE + d);
          }));
        }
      }
    }
    cluster_wait();  // the others have read this block's shared memory
  }

  // All threads: whether `count` blocks have now written their parts, this one the last.
  DEVICE bool is_last_of(int count, int* ticket) const {
    block_sync();
    if (threadIdx.x == 0) {
      device_fence();
      *is_last = atomic_add(ticket, 1) == count - 1;
      if (*is_last) *ticket = 0;
      device_fence();
    }
    block_sync();
    return *is_last != 0;
  }
};

template <class Block>
DEVICE void attend(const AttentionParams& p) {
  const Block self = Block::here(p);
  const int size = cluster_size();
  if (split_range(p, p.lengths[self.token], blockIdx.x / size * size, Block::SLOTS).begin >= p.lengths[self.token]) {
    grid_launch_dependents();
    grid_wait();
    return;  // with its whole cluster
  }
  typename Block::Sums s;
  self.run(s);
  Merge<Block>(self).run(s);
}

// As in attention.cu; latents come by the copy engine in smaller tiles, of which more are on their way.
KERNEL(attention_gqa_d64_h8_merged, AttentionParams, 128, 2) { attend<Attention<64, 64, true, 1, 64, 4, 4, false>>(p); }
KERNEL(attention_gqa_d128_h8_merged, AttentionParams, 128, 2) { attend<Attention<128, 128, true, 1, 64, 3, 4, false>>(p); }
KERNEL(attention_gqa_d128_h16_merged, AttentionParams, 128, 2) { attend<Attention<128, 128, true, 2, 64, 2, 4, false>>(p); }
KERNEL(attention_gqa_d256_h8_merged, AttentionParams, 128, 1) { attend<Attention<256, 256, true, 1, 64, 3, 4, false>>(p); }
KERNEL(attention_mla_l512_r64_h16_merged, AttentionParams, 256, 1) { attend<Attention<576, 512, false, 2, 32, 4, 8, true>>(p); }
KERNEL(attention_mla_l512_r64_h24_merged, AttentionParams, 256, 1) { attend<Attention<576, 512, false, 3, 32, 4, 8, true>>(p); }
KERNEL(attention_mla_l512_r64_h16_t64, AttentionParams, 256, 1) { attend<Attention<576, 512, false, 2, 64, 2, 8, true>>(p); }
KERNEL(attention_mla_l512_r64_h24_t64, AttentionParams, 256, 1) { attend<Attention<576, 512, false, 3, 64, 2, 8, true>>(p); }
