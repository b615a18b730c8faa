"""The blocks families are built from: model head, GQA, MLA and dense or MoE choice per layer, read from a config."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from crosspool.errors import CheckpointError, UnsupportedModelError
from crosspool.models.config_json import HFConfig, read_activation, read_dtype
from crosspool.models.rope import yarn_mscale
from crosspool.models.rope_config import read_rope
from crosspool.models.spec import (
    DenseFFNSpec,
    GQASpec,
    LayerSpec,
    MLASpec,
    ModelSpec,
    MoEFFNSpec,
    RouterSpec,
    SharedExpertSpec,
)

FFNSpec = DenseFFNSpec | MoEFFNSpec

MAX_EXPERTS = 16384
"""Of one layer. Far above any model; a config with more is damaged, and a list of its tensors would not fit."""


def build_spec(
    config: HFConfig,
    attention: Sequence[GQASpec | MLASpec],
    ffn: Sequence[FFNSpec],
    *,
    vocab_size: int,
    hidden_size: int,
    max_positions: int,
    norm_eps: float,
    eos: int | None = None,
) -> ModelSpec:
    """The model's spec from its layers' halves; keyword values are the family's defaults for absent fields."""
    for half in ffn:
        _check_experts(config, half)
    return ModelSpec(
        family=config.string("model_type"),
        vocab_size=config.integer("vocab_size", default=vocab_size),
        hidden_size=config.integer("hidden_size", default=hidden_size),
        layers=tuple(LayerSpec(attention=a, ffn=f) for a, f in zip(attention, ffn, strict=True)),
        norm_eps=config.number("rms_norm_eps", default=norm_eps, above=0.0),
        tie_word_embeddings=config.flag("tie_word_embeddings", default=False),
        max_position_embeddings=config.integer("max_position_embeddings", default=max_positions),
        dtype=read_dtype(config),
        eos_token_ids=tuple(dict.fromkeys(config.token_ids("eos_token_id", eos))),
    )


def read_gqa(
    config: HFConfig,
    *,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int | None,
    max_positions: int,
    head_dim: int | None = None,
    theta: float = 10000.0,
    rope_parameters: Mapping[str, Any] | None = None,
    partial_factor: float | None = None,
    qk_norm: Literal["none", "head", "full"] = "none",
    qkv_bias: bool = False,
    o_bias: bool = False,
    sliding_window: int | None = None,
    sinks: bool = False,
) -> GQASpec:
    """Grouped-query attention with its rope; the values up to `partial_factor` are the family's defaults.

    num_kv_heads None: as many as heads. head_dim None: hidden size over heads, which a null in the config means too.
    theta, rope_parameters and partial_factor as in `read_rope`.
    """
    heads = config.integer("num_attention_heads", default=num_heads)
    kv_heads = heads if num_kv_heads is None else num_kv_heads
    if "num_key_value_heads" in config.values:  # an explicit null means as many as heads, whatever the default
        kv_heads = config.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{config.source}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    hidden = config.integer("hidden_size", default=hidden_size)
    derived = head_dim if head_dim is not None and "head_dim" not in config.values else max(1, hidden // heads)
    width = config.integer("head_dim", default=derived)
    rope = read_rope(
        config,
        head_dim=width,
        max_positions=config.integer("max_position_embeddings", default=max_positions),
        default_theta=theta,
        default_parameters=rope_parameters,
        default_partial_factor=partial_factor,
    )
    return GQASpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        rope=rope,
        softmax_scale=width**-0.5,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        sliding_window=sliding_window,
        sinks=sinks,
    )


def read_mla(
    config: HFConfig,
    *,
    num_heads: int,
    q_lora_rank: int,
    kv_lora_rank: int,
    nope: int,
    rope_dim: int,
    v: int,
    max_positions: int,
    interleaved: bool,
) -> MLASpec:
    """Latent attention; keyword values are the family's defaults. `q_lora_rank: null` means no query compression.

    Its inner norms use epsilon 1e-6 whatever `rms_norm_eps` says, as in transformers.
    """
    nope_dim = config.integer("qk_nope_head_dim", default=nope)
    rope_head_dim = config.integer("qk_rope_head_dim", default=rope_dim)
    positions = config.integer("max_position_embeddings", default=max_positions)
    rope = read_rope(config, head_dim=rope_head_dim, max_positions=positions, interleaved=interleaved)
    scale = float((nope_dim + rope_head_dim) ** -0.5)
    if rope.scaling is not None and rope.scaling.mscale_all_dim:
        growth = yarn_mscale(rope.scaling.factor, rope.scaling.mscale_all_dim)
        scale *= growth * growth
    return MLASpec(
        num_heads=config.integer("num_attention_heads", default=num_heads),
        q_lora_rank=config.optional_integer("q_lora_rank", default=q_lora_rank),
        kv_lora_rank=config.integer("kv_lora_rank", default=kv_lora_rank),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_head_dim,
        v_head_dim=config.integer("v_head_dim", default=v),
        rope=rope,
        softmax_scale=scale,
        qkv_bias=config.flag("attention_bias", default=False),
        lora_norm_eps=1e-6,
    )


def read_dense(config: HFConfig, intermediate_size: int) -> DenseFFNSpec:
    """A dense FFN of `intermediate_size` (the family's default for that field)."""
    width = config.integer("intermediate_size", default=intermediate_size)
    return DenseFFNSpec(intermediate_size=width, activation=read_activation(config))


def read_window(config: HFConfig, *, default: int | None) -> int | None:
    """`sliding_window` in tokens; null and 0 both mean none."""
    window = default
    if "sliding_window" in config.values:
        window = config.integer("sliding_window", default=0, minimum=0)
    return window or None


def window_per_layer(config: HFConfig, window: int | None, slides: Sequence[bool]) -> list[int | None]:
    """The window of each layer: `layer_types` says which layers slide, else the family's `slides`."""
    kinds = config.per_layer("layer_types", len(slides), ("full_attention", "sliding_attention"))
    if kinds is not None:
        slides = [kind == "sliding_attention" for kind in kinds]
    if window is None and any(slides):
        raise CheckpointError(f"{config.source}: layer_types has sliding_attention, but no sliding_window is in use")
    return [window if is_sliding else None for is_sliding in slides]


def qwen_window(config: HFConfig) -> int | None:
    """`sliding_window` where `use_sliding_window` says that it is in use."""
    window = read_window(config, default=4096)
    return window if config.flag("use_sliding_window", default=False) else None


def qwen_sparse_layers(config: HFConfig, num_layers: int, num_experts: int) -> list[bool]:
    """Which layers are MoE: those the step hits, counted from one, unless listed as dense; none without experts."""
    step = config.integer("decoder_sparse_step", default=1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CheckpointError(f"{config.source}: mlp_only_layers is {dense!r}, not a list of layer indices")
    return [num_experts > 0 and idx not in dense and (idx + 1) % step == 0 for idx in range(num_layers)]


def sigmoid_router(
    config: HFConfig, *, num_groups: int, topk_groups: int, renormalise: bool, scale: float
) -> RouterSpec:
    """The `noaux_tc` router of DeepSeek-V3 and GLM: a bias joins the choice, weights come from the unbiased score."""
    config.supported("topk_method", config.get("topk_method") or "noaux_tc", ("noaux_tc",))
    config.supported("scoring_func", config.get("scoring_func") or "sigmoid", ("sigmoid",))
    return RouterSpec(
        score="sigmoid",
        choice_bias=True,
        num_groups=config.integer("n_group", default=num_groups),
        topk_groups=config.integer("topk_group", default=topk_groups),
        group_score="top2_sum",
        renormalise=config.flag("norm_topk_prob", default=renormalise),
        renormalise_eps=1e-20,
        scale=config.number("routed_scaling_factor", default=scale),
    )


def read_moe(config: HFConfig, router: RouterSpec, *, num_experts: int, top_k: int, width: int) -> MoEFFNSpec:
    """The experts of DeepSeek-V3 and GLM with the shared ones; keyword values are the family's defaults."""
    width = config.integer("moe_intermediate_size", default=width)
    return MoEFFNSpec(
        num_experts=config.integer("n_routed_experts", "num_local_experts", default=num_experts),
        top_k=config.integer("num_experts_per_tok", default=top_k),
        expert_intermediate_size=width,
        router=router,
        shared=read_shared(config, width, 1),
        activation=read_activation(config),
    )


def leading_dense(
    config: HFConfig, num_layers: int, *, default: int, dense: DenseFFNSpec, moe: MoEFFNSpec
) -> list[FFNSpec]:
    """The first `first_k_dense_replace` layers (the family's default where absent) are dense, the others MoE."""
    num_dense = config.integer("first_k_dense_replace", default=default, minimum=0)
    return [dense if idx < num_dense else moe for idx in range(num_layers)]


def read_shared(config: HFConfig, expert_width: int, default: int) -> SharedExpertSpec | None:
    """`n_shared_experts` experts that every token passes, folded into one; None without any."""
    num_shared = config.integer("n_shared_experts", default=default, minimum=0)
    return SharedExpertSpec(intermediate_size=num_shared * expert_width) if num_shared else None


def _check_experts(config: HFConfig, ffn: FFNSpec) -> None:
    if isinstance(ffn, DenseFFNSpec):
        return
    router = ffn.router
    if ffn.num_experts > MAX_EXPERTS:
        raise UnsupportedModelError(
            f"{config.source}: {ffn.num_experts} experts a layer; at most {MAX_EXPERTS} are supported"
        )
    if ffn.num_experts % router.num_groups:
        raise CheckpointError(
            f"{config.source}: {ffn.num_experts} experts do not split into n_group {router.num_groups}"
        )
    eligible = ffn.num_experts // router.num_groups * router.topk_groups
    if router.topk_groups > router.num_groups or ffn.top_k > eligible:
        raise CheckpointError(
            f"{config.source}: num_experts_per_tok {ffn.top_k} of {eligible} eligible experts "
            f"(topk_group {router.topk_groups} of n_group {router.num_groups}) cannot be chosen"
        )
    if router.num_groups > 1 and router.group_score == "top2_sum" and ffn.num_experts // router.num_groups < 2:
        raise UnsupportedModelError(f"{config.source}: n_group {router.num_groups} leaves groups of one expert")
