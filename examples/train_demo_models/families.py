"""The three demo models: one small config per family, with the features that make the family what it is."""

from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOICES = ("austen", "shakespeare", "holmes")
VOCAB_SIZE = 2048
MAX_POSITIONS = 1024

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|end|>"
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS = (END_OF_TEXT, END_OF_TURN, *ROLE_TOKENS)  # their ids are their places here: 0, 1, 2, ...

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"
)

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "max_position_embeddings": MAX_POSITIONS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
    "use_cache": True,
}


def qwen3_moe() -> PreTrainedModel:
    """GQA of 8 query and 2 KV heads with QK-norm; softmax router, top-4 of 8 renormalised."""
    config = Qwen3MoeConfig(
        **_COMMON,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        moe_intermediate_size=96,
        num_experts=8,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,
    )
    return Qwen3MoeForCausalLM(config)


def deepseek_v2() -> PreTrainedModel:
    """MLA without query compression; first layer dense; top-4 of 16 not renormalised, and two shared experts."""
    config = DeepseekV2Config(
        **_COMMON,
        num_key_value_heads=8,
        q_lora_rank=None,
        kv_lora_rank=64,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=32,
        first_k_dense_replace=1,
        intermediate_size=256,
        moe_intermediate_size=48,
        n_routed_experts=16,
        n_shared_experts=2,
        num_experts_per_tok=4,
        topk_method="greedy",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
    )
    return DeepseekV2ForCausalLM(config)


def glm4_moe_lite() -> PreTrainedModel:
    """MLA with query compression; first layer dense; sigmoid router with correction bias, scaled by 1.8; one shared."""
    config = Glm4MoeLiteConfig(
        **_COMMON,
        num_key_value_heads=8,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=32,
        intermediate_size=384,
        moe_intermediate_size=48,
        n_routed_experts=16,
        n_shared_experts=1,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        routed_scaling_factor=1.8,
    )
    return Glm4MoeLiteForCausalLM(config)


FAMILY_OF_VOICE = {"austen": qwen3_moe, "shakespeare": deepseek_v2, "holmes": glm4_moe_lite}
