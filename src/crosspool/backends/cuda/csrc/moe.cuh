// What both FFN kernels of few tokens share: parameters and activation.
#pragma once
#include "crossing.cuh"
#include "tile.cuh"

enum OutForm { BF16 = 0, FP32 = 1, WORDS = 2 };  // words: fp32 sums that carry their epoch
enum Activation { SILU = 0, GPT_OSS_SWIGLU = 1 };

struct MoeParams {
  const u16* x;               // (tokens, hidden) bf16
  const u16* gate_up;         // (experts, 2 * width, hidden): gate rows, then up rows; null without routed experts
  const u16* down;            // (experts, hidden, width)
  const u16* gate_up_bias;    // (experts, 2 * width) or null
  const u16* down_bias;       // (experts, hidden) or null
  const u16* shared_gate;     // (shared_width, hidden); null without shared experts
  const u16* shared_up;
  const u16* shared_down;     // (hidden, shared_width)
  const float* shared_scale;  // (tokens) or null
  const float* topk_weights;  // (tokens, top_k)
  const int* num_unique;
  const int* unique_ids;
  const int* unique_offsets;
  const int* expert_pairs;    // (tokens * top_k), grouped by expert
  u16* act;                   // (tokens * top_k, width) bf16
  u16* shared_act;            // (tokens, shared_width) bf16
  u64* act_words;             // both within one kernel: two values and the meeting's epoch a word, or null
  void* out;                  // (tokens, hidden) of `out_form`
  int tokens, hidden, width, shared_width, top_k, activation, out_form;
  int max_unique;             // most experts that can be chosen: min(experts, tokens * top_k), at least 1
  int near_values;            // activations of few tokens, where a block's scratch holds them beside its sums
  Departure departure;        // where `out` is a peer's slot
};

// The base of the captured pass that the layer belongs to; 0: of none.
DEVICE u64 base_of(const MoeParams& p) {
  return p.departure.view.lane == nullptr ? 0 : load_relaxed(p.departure.view.lane + BASE);
}
// The epoch that words of that pass carry.
DEVICE u32 out_epoch(const MoeParams& p, u64 base) {
  if (p.out_form != WORDS || has_failed(p.departure.view, base)) return VOID_EPOCH;
  return word_epoch(base, p.departure.layer);
}

DEVICE float activate(int kind, float gate, float up) {
  if (kind == GPT_OSS_SWIGLU) {
    gate = fminf(gate, 7.0f);
    up = fminf(fmaxf(up, -7.0f), 7.0f);
    return (up + 1.0f) * gate / (1.0f + exp_full(-1.702f * gate));
  }
  return up * gate / (1.0f + exp_full(-gate));
}
