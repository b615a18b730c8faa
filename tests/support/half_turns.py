"""The halves of one step, run in one thread: whoever can go on takes a segment, as the loops of ranks would have it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from crosspool.core import SampledToken

Half = Generator[Any, None, Any]


def take_turns(
    halves: dict[str, Half],
    leader: str,
    *,
    pick: Callable[[list[str]], Sequence[str]] = list,
    max_segments: int | None = None,
) -> tuple[Any, list[tuple[SampledToken, ...]]]:
    """What the leader's half returns, and what halves told meanwhile (of a run: tokens of all its steps but the last).

    pick: of the ranks that can go on, those that now take a segment each; none: the step is left as it is.
    max_segments: given up after as many. Halves that have not ended are closed; what the leader returns is then None
    unless its half had ended. Fails where nobody can go on.
    """
    waits = dict.fromkeys(halves)
    result, told, num_segments = None, [], 0
    while halves:
        ready = [rank for rank in halves if waits[rank] is None or waits[rank].satisfied()]
        assert ready, f"nobody can go on: {waits}"
        turn = list(pick(ready))
        if max_segments is not None:
            turn = turn[: max_segments - num_segments]
        if not turn:
            break
        for rank in turn:
            num_segments += 1
            try:
                waits[rank] = next(halves[rank])
                told += waits[rank].told
            except StopIteration as stop:
                result = stop.value if rank == leader else result
                del halves[rank]
    for half in halves.values():
        half.close()
    return result, told


def one_at_random(rng: Any) -> Callable[[list[str]], list[str]]:
    """rng: numpy's Generator. The order in which segments become ready is nobody's promise."""
    return lambda ready: [ready[rng.integers(len(ready))]]
