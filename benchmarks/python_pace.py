"""How quick this machine's Python is right now, told beside figures of what hosts take of a core.

A machine's cores may be shared, or slower than another day's: the same code then takes longer. What changes with
this loop is the machine's, what does not is the code's.
"""

from __future__ import annotations

import time

_LOOKS = 500


def loop_us() -> float:
    """Microseconds of processor time of some tenths of a millisecond of work: calls, attributes, dicts, tuples."""
    begin_s = time.thread_time()
    work = _Work()
    for number in range(1000):
        work.step(number)
    return 1e6 * (time.thread_time() - begin_s)


def pace_us() -> float:
    """The median of some such loops."""
    return sorted(loop_us() for _ in range(9))[4]


def timer_us() -> float:
    """Microseconds that a look at a thread's processor time takes; a figure has about one in it for each stretch."""
    begin_s = time.perf_counter()
    for _ in range(_LOOKS):
        time.thread_time()
    return 1e6 * (time.perf_counter() - begin_s) / _LOOKS


class _Work:
    def __init__(self) -> None:
        self.kept: dict[tuple[int, str], int] = {}
        self.total = 0

    def step(self, number: int) -> None:
        key = (number & 63, "lane")
        self.kept[key] = self.kept.get(key, 0) + number
        self.total += len(self.kept)
