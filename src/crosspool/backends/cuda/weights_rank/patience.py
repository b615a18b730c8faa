"""Patience: how long prompts step aside for decode on a weights rank before their pieces take decode's priority.

Kernels of a lower priority begin when no block of a higher one waits. Beside two lanes of decode that is almost never:
a layer's FFN of a prompt, a dozen kernels, then takes tens of milliseconds instead of one, and its first token seconds.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

PIECE_S, TOKEN_S = 1e-3, 0.75e-6
"""What a piece may take on average, and for each of its tokens: about twice its time alone on an H200."""

MOST_BEHIND_S = 0.05
"""Pieces that are further behind than this are not made up for."""


class Event(Protocol):
    """A moment on a stream, as `torch.cuda.Event` with timing."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds from this one to a later one."""


@dataclass(frozen=True, slots=True)
class _Piece:
    begin: Event
    end: Event
    allowed_s: float


class Patience:
    """Of one weights rank, over the pieces of all its lanes.

    behind_s: by how much pieces have been slower than they may; faster ones make up for it, but earn nothing.
    """

    def __init__(self, make_event: Callable[[], Event] | None, *, has_any: bool = True) -> None:
        """make_event: None where nothing is timed, and decode always comes first.

        has_any: False where prompts never step aside.
        """
        self._make_event, self._has_any = make_event, has_any
        self._pieces: deque[_Piece] = deque()
        self.behind_s = 0.0

    @property
    def is_out(self) -> bool:
        """Whether the next piece takes decode's priority."""
        while self._pieces and self._pieces[0].end.query():
            piece = self._pieces.popleft()
            taken_s = piece.begin.elapsed_time(piece.end) / 1e3
            self.behind_s = min(max(self.behind_s + taken_s - piece.allowed_s, 0.0), MOST_BEHIND_S)
        return self.behind_s > 0 or not self._has_any

    @contextmanager
    def timed(self, num_tokens: int) -> Iterator[None]:
        """A piece's kernels, enqueued on torch's current stream within, from the moment that its rows are there."""
        if self._make_event is None:
            yield
            return
        begin, end = self._make_event(), self._make_event()
        begin.record()
        yield
        end.record()
        self._pieces.append(_Piece(begin, end, PIECE_S + num_tokens * TOKEN_S))
