"""One pass of the FFN half on fixed buffers."""

from collections.abc import Iterator
from typing import Literal

from crosspool.backends.cuda.channels.transport import FFNCrossing, begin_pass, end_pass
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.advance import advance
from crosspool.backends.cuda.steps.lane_memory import LaneMemory
from crosspool.backends.cuda.weights_rank.ffn_half import FFNHalf
from crosspool.models.spec import MoEFFNSpec

SumsBy = Literal["words", "flags"]
"""How partial sums reach the peer. words: each carries its epoch, where they fit, else as "flags". flags: written by
the FFN's last kernel, and a small one behind it raises the flag."""


class FFNPass:
    """The kernels of a pass of `rows` rows. takes_choices: experts come with the rows (`route: kv`)."""

    def __init__(
        self,
        kernels: Launcher,
        lane: LaneMemory,
        half: FFNHalf,
        crossing: FFNCrossing,
        rows: int,
        hidden: int,
        *,
        sums_by: SumsBy = "flags",
        takes_choices: bool = False,
    ) -> None:
        self._kernels, self._lane, self._half, self._crossing = kernels, lane, half, crossing
        self._rows, self._hidden = rows, hidden
        self._sums_by, self._takes_choices = sums_by, takes_choices

    def advance(self, again: int = 0, *, is_first: bool = False) -> None:
        """Enqueue what waits for the next step's rows, or the first one's, and ends the run where none come."""
        flags = [self._crossing.link.inbox.flag]
        advance(self._kernels, self._lane, len(self._half.layers), flags, again=again, is_first=is_first)

    def kernels(self) -> Iterator[int]:
        """Enqueue every kernel; yields each layer before its wait."""
        crossing, rows, hidden = self._crossing, self._rows, self._hidden
        begin_pass(self._kernels, self._lane)
        for layer, weights in enumerate(self._half.layers):
            yield layer
            crossing.wait(layer)
            choices = None
            if self._takes_choices and isinstance(weights.spec, MoEFFNSpec):
                choices = crossing.choices(layer, rows, hidden, weights.spec.top_k)
            x = crossing.rows(layer, rows, hidden)
            words = crossing.words(layer, rows, hidden) if self._sums_by == "words" else None
            if words is not None:
                self._half.run(layer, x, words, departure=crossing.epochs(layer), choices=choices)
            else:
                self._half.run(layer, x, crossing.sums(layer, rows, hidden), choices=choices)
                crossing.signal(layer)
        end_pass(self._kernels, self._lane, len(self._half.layers))
