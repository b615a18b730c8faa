"""Grouped-query attention: one fused projection, QK-norm, RoPE, cache write, attention, output projection."""

import numpy as np

from crosspool.backends.base import FloatArray
from crosspool.backends.numpy.attention import attend
from crosspool.backends.numpy.kv_cache import LayerCache, StepSlots
from crosspool.backends.numpy.matrices import panels, product
from crosspool.backends.numpy.norms import RMSNorm
from crosspool.backends.numpy.rotary import ComplexArray, pair_order, rotate
from crosspool.models.spec import GQASpec


class GQAAttention:
    """One layer's weights, packed: q, k and v rows in one matrix, heads in `pair_order`, the softmax scale in q.

    Under QK-norm the scale goes into q's norm weight instead, since the norm would undo it.
    """

    def __init__(self, spec: GQASpec, weights: dict[str, FloatArray], norm_eps: float) -> None:
        self.spec = spec
        self._q_width = spec.num_heads * spec.head_dim
        self._kv_width = spec.num_kv_heads * spec.head_dim
        order = pair_order(spec.rope, spec.head_dim)
        scale = np.float32(spec.softmax_scale)
        q_scale = scale if spec.qk_norm == "none" else np.float32(1)
        q, k, v = weights["q"], weights["k"], weights["v"]
        self._qkv = panels(np.concatenate([_reorder(q, order) * q_scale, _reorder(k, order), v]).T)
        self._qkv_bias = None
        if spec.qkv_bias:
            biases = [_reorder(weights["q_bias"], order) * q_scale, _reorder(weights["k_bias"], order)]
            self._qkv_bias = np.concatenate([*biases, weights["v_bias"]])
        self._norms: tuple[RMSNorm, ...] = ()
        if spec.qk_norm == "head":
            q_norm = np.tile(weights["q_norm"][order] * scale, (spec.num_heads, 1))
            k_norm = np.tile(weights["k_norm"][order], (spec.num_kv_heads, 1))
            self._norms = (RMSNorm(np.concatenate([q_norm, k_norm]), norm_eps),)
        elif spec.qk_norm == "full":
            q_norm = _reorder(weights["q_norm"], order) * scale
            self._norms = (RMSNorm(q_norm, norm_eps), RMSNorm(_reorder(weights["k_norm"], order), norm_eps))
        self._o = panels(weights["o"].T)
        self._o_bias = weights["o_bias"] if spec.o_bias else None
        self.sinks = weights["sinks"].reshape(spec.num_kv_heads, -1) if spec.sinks else None

    @property
    def window(self) -> int | None:
        """How many of the last slots a token sees; None: all."""
        return self.spec.sliding_window

    @property
    def nbytes(self) -> int:
        arrays = (self._qkv, self._qkv_bias, self._o, self._o_bias, self.sinks, *self._norms)
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def num_rotated_heads(self) -> int:
        """Heads whose rotary part lies together, queries and keys."""
        return self.spec.num_heads + self.spec.num_kv_heads

    def __call__(self, x: FloatArray, turns: ComplexArray, cache: LayerCache, slots: StepSlots) -> FloatArray:
        """(num_tokens, hidden) attention output of the normed `x`; the tokens' K and V are written to the cache.

        A step of one token may come as a vector (hidden,), with turns (heads, dim / 2); what goes out then is one too.
        """
        query, rows = self.project(x, turns)
        cache.write(rows, slots)
        return self.output(attend(query, cache, slots, self.spec.sliding_window, self.sinks))

    def project(self, x: FloatArray, turns: ComplexArray) -> tuple[FloatArray, FloatArray]:
        """Queries (num_tokens, kv_heads, group, head_dim) and cache rows (num_tokens, row) of the normed `x`."""
        spec, lead = self.spec, x.shape[:-1]
        qkv = product(x, self._qkv)
        if self._qkv_bias is not None:
            qkv += self._qkv_bias
        qk_width = self._q_width + self._kv_width
        heads = qkv[..., :qk_width].reshape(*lead, -1, spec.head_dim)
        if spec.qk_norm == "head":
            self._norms[0](heads, out=heads)
        elif spec.qk_norm == "full":
            for norm, part in zip(self._norms, np.split(qkv[..., :qk_width], [self._q_width], axis=-1), strict=True):
                norm(part, out=part)
        rotate(heads[..., : spec.rope.dim], turns)
        query = heads[..., : spec.num_heads, :].reshape(*lead, spec.num_kv_heads, -1, spec.head_dim)
        return query, qkv[..., self._q_width :]

    def output(self, attended: FloatArray) -> FloatArray:
        """(num_tokens, hidden) from attended values (num_tokens, kv_heads, group, head_dim)."""
        output = product(attended.reshape(*attended.shape[:-3], -1), self._o)
        if self._o_bias is not None:
            output += self._o_bias
        return output


def _reorder(rows: FloatArray, order: np.ndarray) -> FloatArray:
    """Rows (heads x head_dim, ...) with each head's elements in `order`."""
    by_head = rows.reshape(-1, len(order), *rows.shape[1:])
    return by_head[:, order].reshape(rows.shape)
