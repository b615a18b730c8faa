"""What the kernels take at most, and which models they run. No torch in here: a deployment asks before it has any."""

from collections.abc import Iterator

from crosspool.models.spec import DenseFFNSpec, GQASpec, MLASpec, ModelSpec, MoEFFNSpec

MAX_HIDDEN = 8192
MAX_EXPERTS = 512
MAX_TOP_K = 32
MAX_GROUPS = 32

VECTOR = 8
"""Elements of a 16-byte load; rows of every matrix and of the cache are whole ones."""


def check_shapes(spec: ModelSpec) -> None:
    """Raises ValueError, naming field and value, for a model that the kernels do not run."""
    for name, value in _widths(spec):
        if value % VECTOR:
            raise ValueError(f"{name} is {value}; GPUs take multiples of {VECTOR}, so serve it by backend numpy")
    for name, value, most in _counts(spec):
        if value > most:
            raise ValueError(f"{name} is {value}; GPUs take at most {most}, so serve it by backend numpy")


def _widths(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    yield "hidden_size", spec.hidden_size
    for attention in spec.shapes:
        yield from _head_widths(attention)
    for ffn in dict.fromkeys(layer.ffn for layer in spec.layers):
        if isinstance(ffn, DenseFFNSpec):
            yield "an FFN's width", ffn.intermediate_size
        else:
            yield "an expert's width", ffn.expert_intermediate_size
            yield "the shared expert's width", 0 if ffn.shared is None else ffn.shared.intermediate_size


def _head_widths(attention: GQASpec | MLASpec) -> Iterator[tuple[str, int]]:
    if isinstance(attention, GQASpec):
        yield "head_dim", attention.head_dim
        return
    for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        yield name, getattr(attention, name) or 0


def _counts(spec: ModelSpec) -> Iterator[tuple[str, int, int]]:
    yield "hidden_size", spec.hidden_size, MAX_HIDDEN
    for ffn in dict.fromkeys(layer.ffn for layer in spec.layers):
        if isinstance(ffn, MoEFFNSpec):
            yield "the number of experts", ffn.num_experts, MAX_EXPERTS
            yield "num_experts_per_tok", ffn.top_k, MAX_TOP_K
            yield "n_group", ffn.router.num_groups, MAX_GROUPS
