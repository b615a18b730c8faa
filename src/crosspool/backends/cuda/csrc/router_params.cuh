// What a router is given and where its choices go, and the shared memory that its block works in.
#pragma once
#include "crossing.cuh"

constexpr int ROUTER_WARPS = 8;
constexpr int ROUTER_THREADS = ROUTER_WARPS * 32;
constexpr int MAX_TOKENS = 32;
constexpr int MAX_EXPERTS = 512;
constexpr int HELD = 4;  // float4 of a weight row a lane keeps in registers: 4,096 elements over the block's warps

enum Score { SOFTMAX = 0, SIGMOID = 1, SOFTMAX_OF_TOPK = 2 };

struct RouterParams {
  const float* weight;       // (rows, hidden) fp32: experts, then the shared expert's gate where shared_scale is given
  const float* logit_bias;   // (experts) or null
  const float* choice_bias;  // (experts) or null
  const u16* x;              // (tokens, hidden) bf16
  float* logits;             // (tokens, rows) fp32
  int* ticket;               // one int, zero before the first launch; every launch leaves it zero
  float* shared_scale;       // (tokens) fp32 or null: sigmoid of the shared expert's gate
  int* topk_ids;             // (tokens, top_k)
  float* topk_weights;       // (tokens, top_k) fp32
  int* num_unique;           // one int
  int* unique_ids;           // (experts): the chosen experts, ascending
  int* unique_offsets;       // (experts + 1): where each chosen expert's pairs begin; one past the last: their number
  int* expert_pairs;         // (tokens * top_k): token * top_k + choice, grouped by expert, ascending within
  int tokens, experts, hidden, top_k;
  int score, num_groups, topk_groups, group_top2, renormalise;
  float renormalise_eps, scale;
  Arrival arrival;           // where `x` is a slot that a peer fills
};

struct RouterSmem {
  float* choice;  // ROUTER_WARPS * MAX_EXPERTS
  float* scores;  // ROUTER_WARPS * MAX_EXPERTS
  float* sums;    // MAX_TOKENS * ROUTER_WARPS
  int* chosen;    // MAX_TOKENS * 32
  int* counts;    // MAX_EXPERTS
  int* last;      // 1
};
DEVICE RouterSmem router_smem(void* smem) {
  float* f = static_cast<float*>(smem);
  RouterSmem s;
  s.choice = f;
  s.scores = s.choice + ROUTER_WARPS * MAX_EXPERTS;
  s.sums = s.scores + ROUTER_WARPS * MAX_EXPERTS;
  s.chosen = reinterpret_cast<int*>(s.sums + MAX_TOKENS * ROUTER_WARPS);
  s.counts = s.chosen + MAX_TOKENS * 32;
  s.last = s.counts + MAX_EXPERTS;
  return s;
}
