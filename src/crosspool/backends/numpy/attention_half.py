"""The KV pool's half of one model, layer by layer: embedding, attention, norms, head. It knows no step and no peer."""

from collections.abc import Iterable

from crosspool.backends.base import FloatArray, IntArray
from crosspool.backends.numpy.attention_gqa import GQAAttention
from crosspool.backends.numpy.attention_mla import MLAAttention
from crosspool.backends.numpy.kv_cache import Arena, StepSlots, layer_caches
from crosspool.backends.numpy.matrices import columns, panels, product
from crosspool.backends.numpy.norms import RMSNorm
from crosspool.backends.numpy.rotary import ComplexArray, RotaryTable
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.models.spec import GQASpec, ModelSpec, RopeSpec

FEW_TOKENS = 32
"""Tokens up to which the rotations of a step are copied for every head."""


class AttentionHalf:
    """A model's non-FFN weights, packed for float32 math, and its view of the arena."""

    def __init__(
        self,
        spec: ModelSpec,
        tensors: dict[str, FloatArray],
        layers: Iterable[dict[str, FloatArray]],
        arena: Arena,
        geometry: PageGeometry,
    ) -> None:
        """`tensors` are the model's own, `layers` those of each layer; a layer is not looked at after the next."""
        self.spec = spec
        tied = spec.tie_word_embeddings
        self._head = panels(tensors["embed" if tied else "head"].T)
        self._embed = None if tied else tensors["embed"]
        self._final_norm = RMSNorm(tensors["final_norm"], spec.norm_eps)
        self._input_norms: list[RMSNorm] = []
        self._post_attention_norms: list[RMSNorm] = []
        self._attention: list[GQAAttention | MLAAttention] = []
        for layer, weights in zip(spec.layers, layers, strict=True):
            attention = layer.attention
            self._input_norms.append(RMSNorm(weights["input_norm"], spec.norm_eps))
            self._post_attention_norms.append(RMSNorm(weights["post_attention_norm"], spec.norm_eps))
            if isinstance(attention, GQASpec):
                self._attention.append(GQAAttention(attention, weights, spec.norm_eps))
            else:
                self._attention.append(MLAAttention(attention, weights))
        self._ropes = [layer.attention.rope for layer in spec.layers]
        self._rotary = {rope: RotaryTable(rope) for rope in dict.fromkeys(self._ropes)}
        self._rotated_heads = {
            rope: attention.num_rotated_heads for rope, attention in zip(self._ropes, self._attention, strict=True)
        }
        self.caches = layer_caches(arena, geometry, spec)
        norms = (self._final_norm, *self._input_norms, *self._post_attention_norms)
        attention_bytes = sum(attention.nbytes for attention in self._attention)
        self.nbytes = (
            (0 if self._embed is None else self._embed.nbytes)
            + self._head.nbytes
            + sum(norm.nbytes for norm in norms)
            + attention_bytes
        )

    def embed(self, token_ids: IntArray) -> FloatArray:
        """(num_tokens, hidden): a new array, the step's residual stream."""
        return columns(self._head, token_ids) if self._embed is None else self._embed[token_ids]

    def turns(self, positions: IntArray) -> dict[RopeSpec, ComplexArray]:
        """The rotations of a step's positions, for every rope the model has."""
        is_few = len(positions) <= FEW_TOKENS
        return {
            rope: table.turns(positions, self._rotated_heads[rope] if is_few else 1)
            for rope, table in self._rotary.items()
        }

    def attend(
        self, layer: int, hidden: FloatArray, turns: dict[RopeSpec, ComplexArray], slots: StepSlots
    ) -> FloatArray:
        """Add the layer's attention to `hidden` in place; what its FFN takes: the normed rows (num_tokens, hidden).

        One token runs as a vector, for which NumPy's calls cost a third.
        """
        rows, own_turns = hidden, turns[self._ropes[layer]]
        if len(hidden) == 1:
            rows, own_turns = hidden[0], own_turns[0]
        x = self._input_norms[layer](rows)
        rows += self._attention[layer](x, own_turns, self.caches[layer], slots)
        return self._post_attention_norms[layer](rows).reshape(hidden.shape)

    def attention_input(self, layer: int, hidden: FloatArray) -> FloatArray:
        return self._input_norms[layer](hidden)

    def attention(self, layer: int) -> GQAAttention | MLAAttention:
        return self._attention[layer]

    def layer_turns(self, layer: int, turns: dict[RopeSpec, ComplexArray]) -> ComplexArray:
        return turns[self._ropes[layer]]

    def ffn_input(self, layer: int, hidden: FloatArray) -> FloatArray:
        return self._post_attention_norms[layer](hidden)

    def logits(self, hidden: FloatArray) -> FloatArray:
        """(rows, vocabulary) from the residual stream after the last layer."""
        if len(hidden) == 1:
            return product(self._final_norm(hidden[0]), self._head)[None]
        return product(self._final_norm(hidden), self._head)
