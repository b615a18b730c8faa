"""One pass of the attention half on fixed buffers: what is captured, and what a pass needs from the host."""

from collections.abc import Iterator
from typing import Protocol

import torch

from crosspool.backends.cuda.channels.transport import begin_pass, end_pass
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.advance import advance
from crosspool.backends.cuda.kernels.sampling import Sampler
from crosspool.backends.cuda.kv_rank.attention_half import AttentionHalf
from crosspool.backends.cuda.kv_rank.exchange import TokenHome
from crosspool.backends.cuda.kv_rank.head_exchange import HeadHome
from crosspool.backends.cuda.steps.lane_memory import LaneMemory


class Crossing(Protocol):
    """Where a layer's FFN is computed: behind channels (`transport.AttentionCrossing`), or on this stream."""

    def norm_put(
        self, layer: int, residual: torch.Tensor, norm_weight: torch.Tensor, normed: torch.Tensor, eps: float
    ) -> None: ...

    def wait_norm(
        self, layer: int, residual: torch.Tensor, norm_weight: torch.Tensor, normed: torch.Tensor, eps: float
    ) -> None: ...

    @property
    def peer_flags(self) -> list[int]:
        """Addresses of the flags of this rank's rows, in the peers' memory; none where nobody waits for them."""
        ...


class AttentionPass:
    """The kernels of a pass of `half.token_ids` rows.

    samples: it ends with logits and a token of each row. is_decode: its rows belong to different sequences.
    home: exchanges with other KV ranks.
    """

    def __init__(
        self,
        kernels: Launcher,
        lane: LaneMemory,
        half: AttentionHalf,
        crossing: Crossing,
        *,
        samples: bool,
        is_decode: bool = False,
        home: TokenHome | HeadHome | None = None,
    ) -> None:
        self._kernels, self._lane, self.half, self._crossing = kernels, lane, half, crossing
        self._is_decode, self._home = is_decode, home
        rows = len(half.token_ids)
        self._sampler = Sampler(kernels, rows, half.spec.vocab_size, half.residual.device) if samples else None

    def advance(self, again: int = 0, *, is_first: bool = False) -> None:
        """Enqueue what decides whether the run goes on with its next step, or begins with its first."""
        tokens = None if self._sampler is None else self._sampler.tokens
        rows, num_layers = len(self.half.token_ids), self.half.spec.num_layers
        flags = self._crossing.peer_flags
        advance(self._kernels, self._lane, num_layers, flags, rows=rows, tokens=tokens, again=again, is_first=is_first)

    def kernels(self) -> Iterator[int]:
        """Enqueue every kernel; yields each layer before its wait, so that a caller may wait in the kernels' stead.

        Before the wait for other KV ranks it yields the layer's complement (~layer).
        """
        half, eps = self.half, self.half.spec.norm_eps
        half.one_row_per_sequence, half.home = self._is_decode, self._home
        rows = None if self._sampler is None else self._sampler.rows
        begin_pass(self._kernels, self._lane, half.token_ids, half.positions, half.lengths, rows)
        half.embed()
        for layer in range(half.spec.num_layers):
            for _ in half.attend_steps(layer):
                yield ~layer
            self._crossing.norm_put(layer, half.residual, half.norm_after_attention(layer), half.normed, eps)
            yield layer
            self._crossing.wait_norm(layer, half.residual, half.norm_after_ffn(layer), half.normed, eps)
        tokens: torch.Tensor | None = None if self._sampler is None else self._sampler(half.logits())
        end_pass(self._kernels, self._lane, half.spec.num_layers, tokens)
