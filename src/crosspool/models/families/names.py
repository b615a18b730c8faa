"""Checkpoint names that most families share, after `model.layers.{layer}.`."""

from crosspool.models.families.family import ExpertNames

NORM_NAMES = {
    "input_norm": ("input_layernorm.weight",),
    "post_attention_norm": ("post_attention_layernorm.weight",),
}

GQA_NAMES = {
    "q": ("self_attn.q_proj.weight",),
    "k": ("self_attn.k_proj.weight",),
    "v": ("self_attn.v_proj.weight",),
    "o": ("self_attn.o_proj.weight",),
    "q_bias": ("self_attn.q_proj.bias",),
    "k_bias": ("self_attn.k_proj.bias",),
    "v_bias": ("self_attn.v_proj.bias",),
    "o_bias": ("self_attn.o_proj.bias",),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "sinks": ("self_attn.sinks",),
}

MLA_NAMES = {
    "q": ("self_attn.q_proj.weight",),
    "q_a": ("self_attn.q_a_proj.weight",),
    "q_a_bias": ("self_attn.q_a_proj.bias",),
    "q_a_norm": ("self_attn.q_a_layernorm.weight",),
    "q_b": ("self_attn.q_b_proj.weight",),
    "kv_a": ("self_attn.kv_a_proj_with_mqa.weight",),
    "kv_a_bias": ("self_attn.kv_a_proj_with_mqa.bias",),
    "kv_a_norm": ("self_attn.kv_a_layernorm.weight",),
    "kv_b": ("self_attn.kv_b_proj.weight",),
    "o": ("self_attn.o_proj.weight",),
    "o_bias": ("self_attn.o_proj.bias",),
}

DENSE_NAMES = {
    "gate": ("mlp.gate_proj.weight",),
    "up": ("mlp.up_proj.weight",),
    "down": ("mlp.down_proj.weight",),
}

MOE_NAMES = {
    "router": ("mlp.gate.weight",),
    "choice_bias": ("mlp.gate.e_score_correction_bias",),
    "shared_gate": ("mlp.shared_experts.gate_proj.weight",),
    "shared_up": ("mlp.shared_experts.up_proj.weight",),
    "shared_down": ("mlp.shared_experts.down_proj.weight",),
}

EXPERT_NAMES = ExpertNames(
    gate="mlp.experts.{expert}.gate_proj.weight",
    up="mlp.experts.{expert}.up_proj.weight",
    down="mlp.experts.{expert}.down_proj.weight",
    fused={"expert_gate_up": "mlp.experts.gate_up_proj", "expert_down": "mlp.experts.down_proj"},
)
