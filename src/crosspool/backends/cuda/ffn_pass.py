"""One pass of the FFN half on fixed buffers."""

from collections.abc import Iterator

import torch

from crosspool.backends.cuda.ffn_half import FFNHalf
from crosspool.backends.cuda.lane_memory import LaneMemory
from crosspool.backends.cuda.launch import Launcher
from crosspool.backends.cuda.transport import FFNCrossing, begin_pass, end_pass


class FFNPass:
    """The kernels of a pass of `rows` rows.

    staged: sums are written here and copied to the peer by one kernel; else the FFN's last kernel writes them straight
    to the peer and a small one raises the flag behind.
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
        staged: bool = False,
    ) -> None:
        self._kernels, self._lane, self._half, self._crossing = kernels, lane, half, crossing
        self._rows, self._hidden = rows, hidden
        self._sums = torch.empty(rows, hidden, dtype=torch.float32, device=lane.device) if staged else None

    def kernels(self) -> Iterator[int]:
        """Enqueue every kernel; yields each layer before its wait."""
        begin_pass(self._kernels, self._lane)
        for layer in range(len(self._half.layers)):
            yield layer
            self._crossing.wait(layer)
            rows = self._crossing.rows(layer, self._rows, self._hidden)
            if self._sums is None:
                self._half.run(layer, rows, self._crossing.sums(layer, self._rows, self._hidden))
                self._crossing.signal(layer)
            else:
                self._half.run(layer, rows, self._sums)
                self._crossing.put(layer, self._sums)
        end_pass(self._kernels, self._lane, len(self._half.layers))
