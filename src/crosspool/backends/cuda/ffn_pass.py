"""One pass of the FFN half on fixed buffers."""

from collections.abc import Iterator

import torch

from crosspool.backends.cuda.ffn_half import FFNHalf
from crosspool.backends.cuda.lane_memory import LaneMemory
from crosspool.backends.cuda.launch import Launcher
from crosspool.backends.cuda.transport import FFNCrossing, begin_pass, end_pass


class FFNPass:
    """The kernels of a pass of `rows` rows.

    fused: a layer's router waits for its rows itself, and its last kernel writes straight to the peer and raises the
    flag. Else separate kernels wait, and copy the sums with the flag behind them.
    """

    def __init__(
        self,
        kernels: Launcher,
        lane: LaneMemory,
        half: FFNHalf,
        crossing: FFNCrossing,
        rows: int,
        hidden: int,
        *,
        fused: bool = True,
    ) -> None:
        self._kernels, self._lane, self._half, self._crossing = kernels, lane, half, crossing
        self._rows, self._hidden = rows, hidden
        self._sums = None if fused else torch.empty(rows, hidden, dtype=torch.float32, device=lane.device)

    def kernels(self) -> Iterator[int]:
        """Enqueue every kernel; yields each layer before its wait."""
        crossing = self._crossing
        begin_pass(self._kernels, self._lane)
        for layer, weights in enumerate(self._half.layers):
            yield layer
            rows = crossing.rows(layer, self._rows, self._hidden)
            if self._sums is not None:
                crossing.wait(layer)
                self._half.run(layer, rows, self._sums)
                crossing.put(layer, self._sums)
                continue
            arrival = None
            if weights.router is None:
                crossing.wait(layer)
            else:
                arrival = crossing.arrival(layer)
            sums = crossing.sums(layer, self._rows, self._hidden)
            self._half.run(layer, rows, sums, arrival, crossing.departure(layer))
        end_pass(self._kernels, self._lane, len(self._half.layers))
