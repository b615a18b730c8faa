"""The canonical tensors of a model: name, shape and pool of each, derived from its spec alone.

Backends see only these names; a family maps them to the names in its checkpoints. Parameter counts, byte counts,
shape checks and random checkpoints all come from this one table.

Shapes (H hidden, I intermediate, E experts, V vocabulary, D head_dim):

KV pool, model:  embed (V, H), final_norm (H), head (V, H; absent when tied)
KV pool, layer:  input_norm (H), post_attention_norm (H), o (H, heads x D_v), o_bias (H), and
  GQA: q (heads x D, H), k, v (kv_heads x D, H), q_bias, k_bias, v_bias, q_norm, k_norm, sinks (heads)
  MLA: q (heads x D_qk, H) or q_a (q_lora, H), q_a_norm, q_b (heads x D_qk, q_lora);
       kv_a (kv_lora + rope, H), kv_a_norm (kv_lora), kv_b (heads x (nope + v), kv_lora), q_a_bias, kv_a_bias
Weights pool, layer:
  dense: gate (I, H), up (I, H), down (H, I)
  MoE:   router (E, H), router_bias (E), choice_bias (E), expert_gate_up (E, 2I, H: gate rows, then up rows),
         expert_down (E, H, I), expert_gate_up_bias (E, 2I), expert_down_bias (E, H),
         shared_gate (I_s, H), shared_up (I_s, H), shared_down (H, I_s), shared_expert_gate (1, H)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from crosspool.models.spec import DTYPE_BYTES, DenseFFNSpec, GQASpec, MLASpec, ModelSpec, MoEFFNSpec

Pool = Literal["kv", "weights"]
Shapes = dict[str, tuple[int, ...]]

FLOAT32_TENSORS = frozenset({"router", "router_bias", "choice_bias"})
"""Kept in float32 by every backend whatever the checkpoint stores (models.md: router and bias in FP32)."""


ROUTER_TENSORS = frozenset({"router", "router_bias", "choice_bias", "shared_expert_gate"})
"""What the KV pool holds too where experts are chosen there (`route: kv`)."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One canonical tensor; `layer` is None for the model's own (embedding, final norm, head)."""

    pool: Pool
    layer: int | None
    name: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


def model_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    """Every tensor of the model, in execution order."""
    yield TensorSpec("kv", None, "embed", (spec.vocab_size, spec.hidden_size))
    for idx, layer in enumerate(spec.layers):
        attention = layer.attention
        shapes = _gqa_shapes(attention, spec.hidden_size) if isinstance(attention, GQASpec) else {}
        if isinstance(attention, MLASpec):
            shapes = _mla_shapes(attention, spec.hidden_size)
        for name, shape in _norm_shapes(spec.hidden_size).items():
            yield TensorSpec("kv", idx, name, shape)
        for name, shape in shapes.items():
            yield TensorSpec("kv", idx, name, shape)
        for name, shape in ffn_shapes(layer.ffn, spec.hidden_size).items():
            yield TensorSpec("weights", idx, name, shape)
    yield TensorSpec("kv", None, "final_norm", (spec.hidden_size,))
    if not spec.tie_word_embeddings:
        yield TensorSpec("kv", None, "head", (spec.vocab_size, spec.hidden_size))


def _norm_shapes(hidden: int) -> Shapes:
    return {"input_norm": (hidden,), "post_attention_norm": (hidden,)}


def _gqa_shapes(attention: GQASpec, hidden: int) -> Shapes:
    q_width = attention.num_heads * attention.head_dim
    kv_width = attention.num_kv_heads * attention.head_dim
    shapes: Shapes = {"q": (q_width, hidden), "k": (kv_width, hidden), "v": (kv_width, hidden), "o": (hidden, q_width)}
    if attention.qkv_bias:
        shapes |= {"q_bias": (q_width,), "k_bias": (kv_width,), "v_bias": (kv_width,)}
    if attention.o_bias:
        shapes["o_bias"] = (hidden,)
    if attention.qk_norm == "head":
        shapes |= {"q_norm": (attention.head_dim,), "k_norm": (attention.head_dim,)}
    elif attention.qk_norm == "full":
        shapes |= {"q_norm": (q_width,), "k_norm": (kv_width,)}
    if attention.sinks:
        shapes["sinks"] = (attention.num_heads,)
    return shapes


def _mla_shapes(attention: MLASpec, hidden: int) -> Shapes:
    q_width = attention.num_heads * attention.qk_head_dim
    latent = attention.kv_lora_rank
    shapes: Shapes = {}
    if attention.q_lora_rank is None:
        shapes["q"] = (q_width, hidden)
    else:
        rank = attention.q_lora_rank
        shapes |= {"q_a": (rank, hidden), "q_a_norm": (rank,), "q_b": (q_width, rank)}
    shapes |= {
        "kv_a": (latent + attention.qk_rope_head_dim, hidden),
        "kv_a_norm": (latent,),
        "kv_b": (attention.num_heads * (attention.qk_nope_head_dim + attention.v_head_dim), latent),
        "o": (hidden, attention.num_heads * attention.v_head_dim),
    }
    if attention.qkv_bias:
        shapes |= {"kv_a_bias": (latent + attention.qk_rope_head_dim,), "o_bias": (hidden,)}
        if attention.q_lora_rank is not None:
            shapes["q_a_bias"] = (attention.q_lora_rank,)
    return shapes


def ffn_shapes(ffn: DenseFFNSpec | MoEFFNSpec, hidden: int) -> Shapes:
    """Canonical FFN tensors of one layer at full (unsliced) width."""
    if isinstance(ffn, DenseFFNSpec):
        width = ffn.intermediate_size
        return {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    experts, width = ffn.num_experts, ffn.expert_intermediate_size
    shapes: Shapes = {"router": (experts, hidden)}
    if ffn.router.logit_bias:
        shapes["router_bias"] = (experts,)
    if ffn.router.choice_bias:
        shapes["choice_bias"] = (experts,)
    shapes |= {"expert_gate_up": (experts, 2 * width, hidden), "expert_down": (experts, hidden, width)}
    if ffn.expert_bias:
        shapes |= {"expert_gate_up_bias": (experts, 2 * width), "expert_down_bias": (experts, hidden)}
    if ffn.shared is not None:
        shared = ffn.shared.intermediate_size
        shapes |= {"shared_gate": (shared, hidden), "shared_up": (shared, hidden), "shared_down": (hidden, shared)}
        if ffn.shared.gated:
            shapes["shared_expert_gate"] = (1, hidden)
    return shapes


def weight_bytes(spec: ModelSpec, pool: Pool | None = None) -> int:
    """Bytes the model's weights take as stored (dtype of the checkpoint; router tensors in float32)."""
    element_bytes = DTYPE_BYTES[spec.dtype]
    return sum(
        tensor.num_elements * (4 if tensor.name in FLOAT32_TENSORS else element_bytes)
        for tensor in model_tensors(spec)
        if pool in (None, tensor.pool)
    )
