"""A channel: hidden rows of one lane in one direction between two ranks, in memory that the consumer reads.

Layout of the region of a link (the two channels between a KV rank and a weights rank for one lane): A2F, then F2A, each

    flag, 64 bits, alone in its line but for the `WorkClock` | slot of even layers | slot of odd layers

A slot holds `capacity` float32 elements. The flag carries the epoch of the newest payload; it only grows, so nothing is
ever reset, and a payload of a step that was given up cannot be taken for one of a later step.
"""

from collections.abc import Callable

import numpy as np

from crosspool.backends.base import FloatArray
from crosspool.cluster.fence import STORES_ARE_ORDERED, Fence
from crosspool.cluster.region import LINE_BYTES
from crosspool.units import align_up

VIEWS_KEPT = 64


def channel_bytes(capacity: int) -> int:
    """Bytes of one channel whose slots hold `capacity` float32 elements."""
    return LINE_BYTES + 2 * _slot_bytes(capacity)


def link_bytes(capacity: int) -> int:
    """Bytes of the two channels of one link."""
    return 2 * channel_bytes(capacity)


def a2f_part(region: memoryview, capacity: int) -> memoryview:
    """The channel from the KV rank to the weights rank."""
    return region[: channel_bytes(capacity)]


def f2a_part(region: memoryview, capacity: int) -> memoryview:
    """The channel from the weights rank to the KV rank."""
    return region[channel_bytes(capacity) : link_bytes(capacity)]


class ChannelInlet:
    """The consumer's end (`backends.base.Inlet`)."""

    __slots__ = ("_fence", "_flag", "_slots")

    def __init__(self, memory: memoryview, capacity: int) -> None:
        self._flag = memory[:8].cast("Q")
        self._slots = Slots(memory, capacity)
        self._fence = Fence()

    def arrived(self, epoch: int) -> bool:
        """Whether the payload of `epoch`, or of a later one, lies in its slot."""
        if self._flag[0] < epoch:
            return False
        if not STORES_ARE_ORDERED:
            self._fence.full()
        return True

    def take(self, layer: int, num_tokens: int, width: int) -> FloatArray:
        """(num_tokens, width) float32 view of the slot of this layer's parity; valid until two layers later."""
        return self._slots.view(layer, (num_tokens, width))


class ChannelOutlet:
    """The producer's end (`backends.base.Outlet`). `ring` wakes the consumer's host if it may be asleep."""

    __slots__ = ("_capacity", "_fence", "_flag", "_ring", "_slots")

    def __init__(self, memory: memoryview, capacity: int, ring: Callable[[], None]) -> None:
        self._flag = memory[:8].cast("Q")
        self._slots = Slots(memory, capacity)
        self._capacity = capacity
        self._fence = Fence()
        self._ring = ring

    def put(self, layer: int, epoch: int, payload: FloatArray) -> None:
        """Copy `payload` (num_tokens, width) to the consumer's slot, then raise its flag to `epoch`."""
        if payload.size > self._capacity:
            raise ValueError(
                f"{payload.shape[0]} tokens of width {payload.shape[1]} do not fit a channel of {self._capacity} "
                "elements; raise max_tokens_per_step"
            )
        np.copyto(self._slots.view(layer, payload.shape), payload)
        if not STORES_ARE_ORDERED:
            self._fence.full()
        self._flag[0] = epoch
        self._ring()


def _slot_bytes(capacity: int) -> int:
    return align_up(4 * capacity, LINE_BYTES)


class Slots:
    """The two slots of a channel, as arrays of the shapes that cross; few shapes do, over and over."""

    __slots__ = ("_arrays", "_views")

    def __init__(self, memory: memoryview, capacity: int) -> None:
        even = np.frombuffer(memory, np.float32, capacity, LINE_BYTES)
        odd = np.frombuffer(memory, np.float32, capacity, LINE_BYTES + _slot_bytes(capacity))
        self._arrays = (even, odd)
        self._views: tuple[dict[tuple[int, ...], FloatArray], ...] = ({}, {})

    def view(self, layer: int, shape: tuple[int, ...]) -> FloatArray:
        """The slot of the layer's parity as (num_tokens, width)."""
        parity = layer & 1
        views = self._views[parity]
        view = views.get(shape)
        if view is None:
            if len(views) >= VIEWS_KEPT:
                views.clear()
            num_tokens, width = shape
            view = views[shape] = self._arrays[parity][: num_tokens * width].reshape(num_tokens, width)
        return view


CLOCK_AT = LINE_BYTES // 2
"""Place of its clock in an F2A channel: the second half of the flag's line, which the same rank writes."""


class WorkClock:
    """Seconds that a weights rank has computed for a lane since the channel was opened. One writer, one reader.

    The weights rank adds to it after each segment, so that nothing more crosses in a step; the KV rank reads it when a
    step ends. The time of a step's last segment may be told just after the step's end, and that of a step that is given
    up is not taken: then the lane's next step has it.
    """

    __slots__ = ("_cell", "_taken_s")

    def __init__(self, channel: memoryview) -> None:
        self._cell = channel[CLOCK_AT : CLOCK_AT + 8].cast("d")
        self._taken_s: float = 0.0

    def add(self, seconds: float) -> None:
        """The writer has computed for that long."""
        self._cell[0] += seconds

    def take(self) -> float:
        """What the reader has not taken yet."""
        total_s = self._cell[0]
        since_s, self._taken_s = total_s - self._taken_s, total_s
        return since_s
