"""Multi-head latent attention: the cache holds one latent and one rope key per token, for all heads.

Few queries are scored against the latents themselves: the key half of kv_b is absorbed into the query, the value half
applied to the attended latent. Long chunks expand latents to keys and values instead, which costs less there.
Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.
"""

import numpy as np

from crosspool.backends.base import FloatArray
from crosspool.backends.numpy.attention import attend, attend_chunk, attend_row
from crosspool.backends.numpy.kv_cache import LayerCache, RowSlots, StepSlots
from crosspool.backends.numpy.matrices import transposed
from crosspool.backends.numpy.norms import RMSNorm
from crosspool.backends.numpy.rotary import ComplexArray, pair_order, rotate
from crosspool.models.spec import MLASpec


class MLAAttention:
    """One layer's weights, packed: [q or q_a | kv_a] in one matrix, kv_b split by head, the softmax scale in q."""

    window = None  # a token sees every slot before it
    sinks = None

    def __init__(self, spec: MLASpec, weights: dict[str, FloatArray]) -> None:
        self.spec = spec
        nope, rope, lora = spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.kv_lora_rank
        order = pair_order(spec.rope, rope)
        q_order = np.concatenate([np.arange(nope), nope + order])
        kv_order = np.concatenate([np.arange(lora), lora + order])
        q = weights["q" if spec.q_lora_rank is None else "q_b"]
        q = q.reshape(spec.num_heads, spec.qk_head_dim, -1)[:, q_order].reshape(q.shape) * np.float32(
            spec.softmax_scale
        )
        first = q if spec.q_lora_rank is None else weights["q_a"]
        self._first_width = len(first)
        self._down = transposed(np.concatenate([first, weights["kv_a"][kv_order]]))
        self._down_bias = None
        if spec.qkv_bias:
            q_a_bias = np.zeros(len(first), np.float32) if spec.q_lora_rank is None else weights["q_a_bias"]
            self._down_bias = np.concatenate([q_a_bias, weights["kv_a_bias"][kv_order]])
        self._q_a_norm = None if spec.q_lora_rank is None else RMSNorm(weights["q_a_norm"], spec.lora_norm_eps)
        self._q_b = None if spec.q_lora_rank is None else transposed(q)
        self._kv_a_norm = RMSNorm(weights["kv_a_norm"], spec.lora_norm_eps)
        kv_b = weights["kv_b"].reshape(spec.num_heads, nope + spec.v_head_dim, lora)
        self._key_up = np.ascontiguousarray(kv_b[:, :nope])  # (heads, nope, lora)
        self._value_up = transposed(kv_b[:, nope:])  # (heads, lora, v)
        self._o = transposed(weights["o"])
        self._o_bias = weights["o_bias"] if spec.qkv_bias else None

    @property
    def nbytes(self) -> int:
        matrices = (self._down, self._q_b, self._key_up, self._value_up, self._o)
        vectors = (self._down_bias, self._o_bias, self._q_a_norm, self._kv_a_norm)
        return sum(part.nbytes for part in (*matrices, *vectors) if part is not None)

    def __call__(self, x: FloatArray, turns: ComplexArray, cache: LayerCache, slots: StepSlots) -> FloatArray:
        """(num_tokens, hidden) attention output of the normed `x`; the tokens' latents are written to the cache."""
        query, rows = self._project(x, turns)
        cache.write(rows, slots)
        if slots.is_decode:
            return self.output(attend(self._absorb(query), cache, slots))
        parts = [self._attend_row(query[slot_row.start : slot_row.stop], cache, slot_row) for slot_row in slots.rows]
        return self._output(np.concatenate(parts))

    def project(self, x: FloatArray, turns: ComplexArray) -> tuple[FloatArray, FloatArray]:
        """Queries (num_tokens, 1, heads, row) as they are scored against cache rows, and rows (num_tokens, row)."""
        query, rows = self._project(x, turns)
        return self._absorb(query), rows

    def output(self, attended: FloatArray) -> FloatArray:
        """(num_tokens, hidden) from attended latents (num_tokens, 1, heads, lora)."""
        return self._output(self._up_values(attended))

    def _project(self, x: FloatArray, turns: ComplexArray) -> tuple[FloatArray, FloatArray]:
        """Queries (num_tokens, heads, nope + rope) and cache rows."""
        spec = self.spec
        lora = spec.kv_lora_rank
        down = np.dot(x, self._down)
        if self._down_bias is not None:
            down += self._down_bias
        q, row = down[:, : self._first_width], down[:, self._first_width :]
        if self._q_b is not None and self._q_a_norm is not None:
            q = np.dot(self._q_a_norm(q), self._q_b)
        query = q.reshape(len(x), spec.num_heads, spec.qk_head_dim)
        rotate(query[..., spec.qk_nope_head_dim :], turns)
        self._kv_a_norm(row[:, :lora], out=row[:, :lora])
        rotate(row[:, None, lora:], turns)
        return query, row

    def _output(self, attended: FloatArray) -> FloatArray:
        """(num_tokens, hidden) from attended values (num_tokens, heads, v)."""
        output: FloatArray = np.dot(attended.reshape(len(attended), -1), self._o)
        if self._o_bias is not None:
            output += self._o_bias
        return output

    def _expands(self, row: RowSlots) -> bool:
        """Whether expanding costs fewer multiplications than scoring `num_tokens` queries against latents."""
        spec = self.spec
        saved = 2 * spec.kv_lora_rank - spec.qk_nope_head_dim - spec.v_head_dim  # per query and slot
        return row.num_tokens * saved > spec.kv_lora_rank * (spec.qk_nope_head_dim + spec.v_head_dim)

    def _attend_row(self, query: FloatArray, cache: LayerCache, row: RowSlots) -> FloatArray:
        """(T, heads, v) from one row's queries (T, heads, nope + rope), whichever way is cheaper."""
        if self._expands(row):
            return self._attend_expanded(query, cache, row)
        return self._up_values(attend_row(self._absorb(query), cache, row))

    def _absorb(self, query: FloatArray) -> FloatArray:
        """(T, 1, heads, lora + rope): queries (T, heads, nope + rope) that can be scored against cache rows."""
        spec = self.spec
        nope, lora = spec.qk_nope_head_dim, spec.kv_lora_rank
        absorbed = np.empty((len(query), 1, spec.num_heads, spec.kv_elements_per_token), dtype=np.float32)
        np.matmul(query[..., :nope].swapaxes(0, 1), self._key_up, out=absorbed[:, 0, :, :lora].swapaxes(0, 1))
        absorbed[:, 0, :, lora:] = query[..., nope:]
        return absorbed

    def _up_values(self, latent: FloatArray) -> FloatArray:
        """(T, heads, v) from attended latents (T, 1, heads, lora)."""
        values: FloatArray = np.matmul(latent[:, 0].swapaxes(0, 1), self._value_up)
        return values.swapaxes(0, 1)

    def _attend_expanded(self, query: FloatArray, cache: LayerCache, row: RowSlots) -> FloatArray:
        """(T, heads, v) from one row's queries, over keys and values of every head, made from the latents."""
        spec = self.spec
        nope, lora = spec.qk_nope_head_dim, spec.kv_lora_rank
        cached = cache.read_rows(row)
        keys = np.empty((spec.num_heads, spec.qk_head_dim, len(cached)), dtype=np.float32)
        np.matmul(self._key_up, cached[:, :lora].T, out=keys[:, :nope])
        keys[:, nope:] = cached[:, lora:].T
        values = np.matmul(cached[:, :lora], self._value_up)
        return attend_chunk(query[:, :, None, :], keys, values, row.first_position)[:, :, 0]
