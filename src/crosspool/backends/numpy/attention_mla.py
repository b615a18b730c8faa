"""Multi-head latent attention: the cache holds one latent and one rope key per token, for all heads.

Few queries are scored against the latents themselves: the key half of kv_b is absorbed into the query, the value half
applied to the attended latent. Long chunks expand latents to keys and values instead, which costs less there.
Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.
"""

import numpy as np

from crosspool.backends.base import FloatArray
from crosspool.backends.numpy.attention import attend, attend_chunk, attend_row
from crosspool.backends.numpy.kv_cache import LayerCache, StepSlots
from crosspool.backends.numpy.matrices import panels, product, transposed
from crosspool.backends.numpy.norms import RMSNorm
from crosspool.backends.numpy.rotary import ComplexArray, pair_order, rotate
from crosspool.backends.sequences.row_slots import RowSlots
from crosspool.models.spec import MLASpec


class MLAAttention:
    """One layer's weights, packed: what `x` is multiplied by in one matrix, kv_b split by head, the softmax scale in q.

    That matrix is [q_a | kv_a], or [q's nope parts | kv_a | q's rope parts]; q_b is [nope parts | rope parts] as well.
    """

    window = None  # a token sees every slot before it
    sinks = None

    def __init__(self, spec: MLASpec, weights: dict[str, FloatArray]) -> None:
        self.spec = spec
        nope, rope, lora = spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.kv_lora_rank
        self._row_width = lora + rope
        order = pair_order(spec.rope, rope)
        q = weights["q" if spec.q_lora_rank is None else "q_b"] * np.float32(spec.softmax_scale)
        by_head = q.reshape(spec.num_heads, spec.qk_head_dim, -1)
        q_nope = by_head[:, :nope].reshape(spec.num_heads * nope, -1)
        q_rope = by_head[:, nope + order].reshape(spec.num_heads * rope, -1)
        kv_a = weights["kv_a"][np.concatenate([np.arange(lora), lora + order])]
        down = [q_nope, kv_a, q_rope] if spec.q_lora_rank is None else [weights["q_a"], kv_a]
        self._first_width = len(down[0])
        self._down = panels(np.concatenate(down).T)
        self._down_bias = None
        if spec.qkv_bias:
            self._down_bias = np.zeros(sum(map(len, down)), dtype=np.float32)
            if spec.q_lora_rank is not None:
                self._down_bias[: self._first_width] = weights["q_a_bias"]
            kv_a_bias = weights["kv_a_bias"]
            self._down_bias[self._first_width :][: self._row_width] = np.append(
                kv_a_bias[:lora], kv_a_bias[lora + order]
            )
        self._q_a_norm = None if spec.q_lora_rank is None else RMSNorm(weights["q_a_norm"], spec.lora_norm_eps)
        self._q_b = None if spec.q_lora_rank is None else panels(np.concatenate([q_nope, q_rope]).T)
        self._kv_a_norm = RMSNorm(weights["kv_a_norm"], spec.lora_norm_eps)
        kv_b = weights["kv_b"].reshape(spec.num_heads, nope + spec.v_head_dim, lora)
        self._key_up = np.ascontiguousarray(kv_b[:, :nope])  # (heads, nope, lora)
        self._value_up = transposed(kv_b[:, nope:])  # (heads, lora, v)
        self._o = panels(weights["o"].T)
        self._o_bias = weights["o_bias"] if spec.qkv_bias else None

    @property
    def nbytes(self) -> int:
        matrices = (self._down, self._q_b, self._key_up, self._value_up, self._o)
        vectors = (self._down_bias, self._o_bias, self._q_a_norm, self._kv_a_norm)
        return sum(part.nbytes for part in (*matrices, *vectors) if part is not None)

    @property
    def num_rotated_heads(self) -> int:
        """Heads whose rotary part lies together, queries and keys."""
        return self.spec.num_heads + (self._q_b is None)

    def __call__(self, x: FloatArray, turns: ComplexArray, cache: LayerCache, slots: StepSlots) -> FloatArray:
        """(num_tokens, hidden) attention output of the normed `x`; the tokens' latents are written to the cache.

        A step of one token may come as a vector (hidden,), with turns (heads, dim / 2); what goes out then is one too.
        """
        nope, rope, rows = self._project(x, turns)
        cache.write(rows, slots)
        if slots.is_decode:
            return self.output(attend(self._absorb(nope, rope), cache, slots))
        parts = [
            self._attend_row(nope[row.start : row.stop], rope[row.start : row.stop], cache, row) for row in slots.rows
        ]
        return self._output(np.concatenate(parts).reshape(len(x), -1))

    def project(self, x: FloatArray, turns: ComplexArray) -> tuple[FloatArray, FloatArray]:
        """Queries (num_tokens, 1, heads, row) as they are scored against cache rows, and rows (num_tokens, row)."""
        nope, rope, rows = self._project(x, turns)
        return self._absorb(nope, rope), rows

    def output(self, attended: FloatArray) -> FloatArray:
        """(num_tokens, hidden) from attended latents (num_tokens, 1, heads, lora)."""
        return self._output(self._up_values(attended).reshape(*attended.shape[:-3], -1))

    def _project(self, x: FloatArray, turns: ComplexArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Queries' parts (num_tokens, heads, nope) and (num_tokens, heads, rope), and cache rows."""
        spec, lead = self.spec, x.shape[:-1]
        heads, lora, rope = spec.num_heads, spec.kv_lora_rank, spec.qk_rope_head_dim
        down = product(x, self._down)
        if self._down_bias is not None:
            down += self._down_bias
        nope = down[..., : self._first_width]
        rows = down[..., self._first_width :][..., : self._row_width]
        if self._q_b is None or self._q_a_norm is None:
            # The rope key and every head's query lie side by side: one rotation for all.
            both = down[..., self._first_width + lora :].reshape(*lead, 1 + heads, rope)
            rotate(both, turns)
            q_rope = both[..., 1:, :]
        else:
            rotate(rows[..., None, lora:], turns[..., :1, :])
            q = product(self._q_a_norm(nope), self._q_b)
            nope, q_rope = q[..., : -heads * rope], q[..., -heads * rope :].reshape(*lead, heads, rope)
            rotate(q_rope, turns)
        self._kv_a_norm(rows[..., :lora], out=rows[..., :lora])
        return nope.reshape(*lead, heads, -1), q_rope, rows

    def _output(self, attended: FloatArray) -> FloatArray:
        """(num_tokens, hidden) from attended values (num_tokens, heads * v)."""
        output = product(attended, self._o)
        if self._o_bias is not None:
            output += self._o_bias
        return output

    def _expands(self, row: RowSlots) -> bool:
        """Whether expanding costs fewer multiplications than scoring `num_tokens` queries against latents."""
        spec = self.spec
        saved = 2 * spec.kv_lora_rank - spec.qk_nope_head_dim - spec.v_head_dim  # per query and slot
        return row.num_tokens * saved > spec.kv_lora_rank * (spec.qk_nope_head_dim + spec.v_head_dim)

    def _attend_row(self, nope: FloatArray, rope: FloatArray, cache: LayerCache, row: RowSlots) -> FloatArray:
        """(T, heads, v) from one row's queries, whichever way is cheaper."""
        if self._expands(row):
            return self._attend_expanded(np.concatenate([nope, rope], axis=-1), cache, row)
        return self._up_values(attend_row(self._absorb(nope, rope), cache, row))

    def _absorb(self, nope: FloatArray, rope: FloatArray) -> FloatArray:
        """(..., 1, heads, lora + rope): queries that can be scored against cache rows."""
        spec = self.spec
        lora = spec.kv_lora_rank
        absorbed = np.empty((*nope.shape[:-2], 1, spec.num_heads, self._row_width), dtype=np.float32)
        by_token = absorbed.reshape(-1, spec.num_heads, self._row_width)
        by_head = nope.reshape(-1, spec.num_heads, spec.qk_nope_head_dim).swapaxes(0, 1)
        np.matmul(by_head, self._key_up, out=by_token[..., :lora].swapaxes(0, 1))
        by_token[..., lora:] = rope
        return absorbed

    def _up_values(self, latent: FloatArray) -> FloatArray:
        """(T, heads, v) from attended latents (T, 1, heads, lora), or (1, heads, lora) of one token."""
        by_head = latent.reshape(-1, *latent.shape[-2:]).swapaxes(0, 1)
        values: FloatArray = np.matmul(by_head, self._value_up)
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
