"""Mixtral: plain GQA, softmax router, renormalised; its files name experts w1 (gate), w3 (up), w2 (down)."""

from crosspool.models.config_json import HFConfig, read_activation
from crosspool.models.families.blocks import build_spec, read_gqa, read_window
from crosspool.models.families.family import EXPERT_NAMES, GQA_NAMES, NORM_NAMES, ExpertNames, Family
from crosspool.models.spec import ModelSpec, MoEFFNSpec, RouterSpec


def read_spec(config: HFConfig) -> ModelSpec:
    num_layers = config.integer("num_hidden_layers", default=32)
    attention = read_gqa(
        config,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        max_positions=131072,
        theta=1e6,
        sliding_window=read_window(config, default=None),
    )
    moe = MoEFFNSpec(
        num_experts=config.integer("num_local_experts", "num_experts", default=8),
        top_k=config.integer("num_experts_per_tok", default=2),
        expert_intermediate_size=config.integer("intermediate_size", default=14336),
        router=RouterSpec(score="softmax", renormalise=True),
        activation=read_activation(config),
    )
    return build_spec(
        config,
        [attention] * num_layers,
        [moe] * num_layers,
        vocab_size=32000,
        hidden_size=4096,
        max_positions=131072,
        norm_eps=1e-5,
        eos=2,
    )


FAMILY = Family(
    model_type="mixtral",
    read_spec=read_spec,
    layer_names=NORM_NAMES | GQA_NAMES | {"router": ("block_sparse_moe.gate.weight", "mlp.gate.weight")},
    experts=ExpertNames(
        gate="block_sparse_moe.experts.{expert}.w1.weight",
        up="block_sparse_moe.experts.{expert}.w3.weight",
        down="block_sparse_moe.experts.{expert}.w2.weight",
        fused=EXPERT_NAMES.fused,
    ),
)
