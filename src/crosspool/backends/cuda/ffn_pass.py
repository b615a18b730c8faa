"""One pass of the FFN half on fixed buffers."""

from collections.abc import Iterator
from typing import Literal

import torch

from crosspool.backends.cuda.ffn_half import FFNHalf
from crosspool.backends.cuda.lane_memory import LaneMemory
from crosspool.backends.cuda.launch import Launcher
from crosspool.backends.cuda.transport import FFNCrossing, begin_pass, end_pass

SumsBy = Literal["words", "direct", "raised", "staged"]
"""How partial sums reach the peer. words: each carries its epoch, where they fit, else as "direct". direct: written by
the FFN's last kernel, and a small one raises the flag. raised: the last kernel raises it too. staged: copied, flag
behind, by a kernel of its own."""


class FFNPass:
    """The kernels of a pass of `rows` rows. waits_in_router: a layer's router polls for its rows itself."""

    def __init__(
        self,
        kernels: Launcher,
        lane: LaneMemory,
        half: FFNHalf,
        crossing: FFNCrossing,
        rows: int,
        hidden: int,
        *,
        sums_by: SumsBy = "direct",
        waits_in_router: bool = False,
    ) -> None:
        self._kernels, self._lane, self._half, self._crossing = kernels, lane, half, crossing
        self._rows, self._hidden = rows, hidden
        self._sums_by, self._waits_in_router = sums_by, waits_in_router
        is_staged = sums_by == "staged"
        self._staged = torch.empty(rows, hidden, dtype=torch.float32, device=lane.device) if is_staged else None

    def kernels(self) -> Iterator[int]:
        """Enqueue every kernel; yields each layer before its wait."""
        crossing = self._crossing
        begin_pass(self._kernels, self._lane)
        for layer, weights in enumerate(self._half.layers):
            yield layer
            arrival = departure = None
            if self._waits_in_router and weights.router is not None:
                arrival = crossing.arrival(layer)
            else:
                crossing.wait(layer)
            if self._sums_by == "raised":
                departure = crossing.departure(layer)
            rows = crossing.rows(layer, self._rows, self._hidden)
            words = crossing.words(layer, self._rows, self._hidden) if self._sums_by == "words" else None
            if words is not None:
                self._half.run(layer, rows, words, arrival, crossing.epochs(layer))
                continue
            if self._staged is not None:
                self._half.run(layer, rows, self._staged, arrival)
                crossing.put(layer, self._staged)
                continue
            self._half.run(layer, rows, crossing.sums(layer, self._rows, self._hidden), arrival, departure)
            if departure is None:
                crossing.signal(layer)
        end_pass(self._kernels, self._lane, len(self._half.layers))
