"""ModelFacts: what the planner knows of a model, from its spec and, for hybrid models, a few numbers beside it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from crosspool.errors import UnsupportedModelError
from crosspool.kv_pool.geometry import PageGeometry, choose_page_tokens, page_geometry
from crosspool.models.spec import DTYPE_BYTES, DenseFFNSpec, GQASpec, MLASpec, ModelSpec, MoEFFNSpec
from crosspool.models.tensors import FLOAT32_TENSORS, ffn_shapes, weight_bytes

FFNSpec = DenseFFNSpec | MoEFFNSpec
AttentionKind = Literal["MHA", "GQA", "MQA", "MLA"]


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """One model as the planner sees it. Bytes are of the stored dtype.

    spec: the layers that have KV, with their FFNs. Hybrid models have more: `other_ffns` are the FFNs of layers without
    KV, `other_kv_pool_parameters` their attention (and what else a spec cannot say), `state_bytes` the fixed state each
    request holds beside its KV. servable: whether a family here can run it.
    """

    name: str
    spec: ModelSpec
    servable: bool = True
    other_ffns: tuple[FFNSpec, ...] = ()
    other_kv_pool_parameters: int = 0
    state_bytes: int = 0

    def __post_init__(self) -> None:
        for layer in self.spec.layers:
            if not isinstance(layer.attention, GQASpec | MLASpec):
                raise UnsupportedModelError(
                    f"{self.name} has attention of kind {type(layer.attention).__name__}; the planner knows "
                    "what GQA and MLA hold in the cache and will not guess"
                )

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.spec.dtype]

    @property
    def num_layers(self) -> int:
        return self.spec.num_layers + len(self.other_ffns)

    @property
    def max_context(self) -> int:
        """The model's own limit, prompt and output together."""
        return self.spec.max_position_embeddings

    @property
    def kv_bytes_per_token(self) -> int:
        """Over all layers, in the weights' dtype: the spec's one function."""
        return self.spec.kv_bytes_per_token()

    @property
    def attention_kind(self) -> AttentionKind:
        attention = self.spec.layers[0].attention
        if isinstance(attention, MLASpec):
            return "MLA"
        if attention.num_kv_heads == attention.num_heads:
            return "MHA"
        return "MQA" if attention.num_kv_heads == 1 else "GQA"

    @property
    def num_kv_heads(self) -> int:
        """Heads that the cache can be cut by; the latent of MLA is one."""
        attention = self.spec.layers[0].attention
        return attention.num_kv_heads if isinstance(attention, GQASpec) else 1

    def ffns(self) -> Iterator[FFNSpec]:
        yield from (layer.ffn for layer in self.spec.layers)
        yield from self.other_ffns

    @cached_property
    def ffn_bytes(self) -> int:
        """The weights pool's share: experts, shared experts, router, dense FFNs of all layers."""
        others = sum(_ffn_bytes(ffn, self.spec.hidden_size, self.element_bytes) for ffn in self.other_ffns)
        return weight_bytes(self.spec, "weights") + others

    @cached_property
    def kv_pool_weight_bytes(self) -> int:
        """The KV pool's share: embedding, attention, norms, head."""
        return weight_bytes(self.spec, "kv") + self.other_kv_pool_parameters * self.element_bytes

    @property
    def weight_bytes(self) -> int:
        return self.ffn_bytes + self.kv_pool_weight_bytes

    @cached_property
    def narrowest_ffn(self) -> int:
        """Smallest intermediate width, which bounds how many ranks an FFN can be sliced over."""
        widths = []
        for ffn in self.ffns():
            if isinstance(ffn, DenseFFNSpec):
                widths.append(ffn.intermediate_size)
            else:
                widths.append(ffn.expert_intermediate_size)
                widths += [ffn.shared.intermediate_size] if ffn.shared is not None else []
        return min(widths)

    @cached_property
    def attention_row_elements(self) -> int:
        """Elements of one token's q, new k and v, and attention output in the widest layer; MLA with absorbed heads."""
        widest = 0
        for layer in self.spec.layers:
            attention = layer.attention
            if isinstance(attention, GQASpec):
                heads = 2 * attention.num_heads * attention.head_dim
            else:
                heads = attention.num_heads * (2 * attention.kv_lora_rank + attention.qk_rope_head_dim)
            widest = max(widest, heads + attention.kv_elements_per_token)
        return widest

    @cached_property
    def ffn_row_elements(self) -> int:
        """Intermediate elements of one token in the widest layer, over all experts it passes."""
        widest = 0
        for ffn in self.ffns():
            if isinstance(ffn, DenseFFNSpec):
                widest = max(widest, ffn.intermediate_size)
            else:
                shared = ffn.shared.intermediate_size if ffn.shared is not None else 0
                widest = max(widest, ffn.top_k * ffn.expert_intermediate_size + shared)
        return widest

    def geometry(self, frame_bytes: int, page_tokens: int | None = None) -> PageGeometry:
        """How pages of this model lie in frames; `page_tokens` None: the pool's own choice."""
        tokens = page_tokens or choose_page_tokens(self.spec, frame_bytes)
        return page_geometry(self.spec, page_tokens=tokens, frame_bytes=frame_bytes, model=self.name)

    def visible_kv_bytes(self, num_tokens: int) -> int:
        """Bytes of one sequence's cache that attention can still see: layers with a window see its last tokens only.

        The pool keeps every token of every layer (`kv_bytes_per_token` x tokens); the difference is what dropping
        tokens behind the window would save.
        """
        element_bytes = DTYPE_BYTES[self.spec.dtype]
        total = 0
        for layer in self.spec.layers:
            window = layer.attention.sliding_window if isinstance(layer.attention, GQASpec) else None
            seen = num_tokens if window is None else min(num_tokens, window)
            total += seen * layer.attention.kv_elements_per_token * element_bytes
        return total


def _ffn_bytes(ffn: FFNSpec, hidden_size: int, element_bytes: int) -> int:
    return sum(
        prod(shape) * (4 if name in FLOAT32_TENSORS else element_bytes)
        for name, shape in ffn_shapes(ffn, hidden_size).items()
    )
