"""ModelSpec: a model is data. One interpreter per backend executes every family from these frozen fields.

A family (`models/families/<name>.py`) turns a Hugging Face config into a spec and names its tensors; nothing else
in the engine knows which family a model belongs to.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Activation = Literal["silu", "gpt_oss_swiglu"]
DType = Literal["float32", "float16", "bfloat16"]

DTYPE_BYTES: dict[DType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length.

    `yarn` (arXiv 2309.00071) uses the beta, mscale and attention fields; `llama3` the two frequency factors;
    `linear` the factor alone. `models/rope.py` turns these fields into frequencies. Under every kind latent attention
    multiplies its scale by what `mscale_all_dim` says.
    """

    kind: Literal["yarn", "llama3", "linear"]
    factor: float
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None  # given outright by some configs; else derived from mscale or factor
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary embedding over the first `dim` elements of each head (of the rope part, for MLA)."""

    theta: float
    dim: int
    interleaved: bool = False  # pairs (0, 1), (2, 3), ... instead of (i, i + dim / 2)
    scaling: RopeScaling | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GQASpec:
    """Grouped-query attention; MHA where `num_kv_heads == num_heads`, MQA where it is one."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    softmax_scale: float
    qk_norm: Literal["none", "head", "full"] = "none"  # RMSNorm per head, or over heads x head_dim (OLMoE)
    qkv_bias: bool = False
    o_bias: bool = False
    sliding_window: int | None = None  # a token sees itself and the window - 1 tokens before it
    sinks: bool = False  # one learnt logit per head joins the softmax's denominator

    @property
    def kv_elements_per_token(self) -> int:
        """Cache elements one token holds in one layer: K and V of every KV head."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the cache holds one latent and one rope key."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RopeSpec
    softmax_scale: float  # yarn's mscale squared included
    qkv_bias: bool = False  # biases of the down projections (q_a, kv_a) and of o
    lora_norm_eps: float = 1e-6

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_elements_per_token(self) -> int:
        """Cache elements one token holds in one layer: latent + rope key, no factor 2, not per head."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSpec:
    """Which experts a token goes to and with what weight. Router math is always float32.

    score: `softmax` or `sigmoid` over all experts, or `softmax_of_topk`: choose by logits, softmax over the chosen.
    choice_bias: a correction bias joins the *choice*; weights come from the unbiased score.
    num_groups > 1: only experts of the best `topk_groups` groups may be chosen; a group's score is its best expert
    (`max`) or the sum of its two best (`top2_sum`).
    """

    score: Literal["softmax", "sigmoid", "softmax_of_topk"]
    choice_bias: bool = False
    logit_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "top2_sum"
    renormalise: bool = False
    renormalise_eps: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedExpertSpec:
    """Experts every token passes, folded into one of their summed width."""

    intermediate_size: int
    gated: bool = False  # output times sigmoid(gate . x) (Qwen2-MoE)


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseFFNSpec:
    """gate/up/down with a gated activation."""

    intermediate_size: int
    activation: Activation = "silu"


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEFFNSpec:
    """Routed experts, optionally beside shared ones."""

    num_experts: int
    top_k: int
    expert_intermediate_size: int
    router: RouterSpec
    shared: SharedExpertSpec | None = None
    activation: Activation = "silu"
    expert_bias: bool = False

    @property
    def choices_width(self) -> int:
        """Numbers that a router's choice takes for one token: expert ids, their weights, the shared expert's scale."""
        return 2 * self.top_k + (self.shared is not None and self.shared.gated)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One transformer layer: attention lives in the KV pool, the FFN in the weights pool."""

    attention: GQASpec | MLASpec
    ffn: DenseFFNSpec | MoEFFNSpec


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything a backend needs to execute a model, and everything the planner needs to place it."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: DType  # of matrices, as the checkpoint stores them
    eos_token_ids: tuple[int, ...] = ()  # union of config, generation_config and tokenizer

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def shapes(self) -> "tuple[GQASpec | MLASpec, ...]":
        """The kinds of attention that layers have, each once, in the order of their first layers."""
        return tuple(dict.fromkeys(layer.attention for layer in self.layers))

    @cached_property
    def shape_of_layer(self) -> tuple[int, ...]:
        """Of each layer, the place of its attention in `shapes`."""
        places = {shape: place for place, shape in enumerate(self.shapes)}
        return tuple(places[layer.attention] for layer in self.layers)

    @cached_property
    def kv_elements_per_token_layer(self) -> int:
        """Largest per-layer cache row; pages give every layer the same room."""
        return max(layer.attention.kv_elements_per_token for layer in self.layers)

    def kv_bytes_per_token(self, kv_dtype: DType | None = None) -> int:
        """KV bytes one token holds over all layers. The planner, the pool and the gauges all use this function."""
        element_bytes = DTYPE_BYTES[kv_dtype or self.dtype]
        return element_bytes * sum(layer.attention.kv_elements_per_token for layer in self.layers)
