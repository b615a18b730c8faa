"""WorkClock: how long a weights rank has computed for a lane, told beside the flag of the lane's F2A channel.

The weights rank adds to it after each segment, so that nothing more crosses in a step; the KV rank reads it when a step
ends. The time of a step's last segment may be told just after the step's end, and that of a step that is given up is
not taken: then the lane's next step has it.
"""

from crosspool.cluster.region import LINE_BYTES

OFFSET = LINE_BYTES // 2
"""Its place in a channel: the second half of the flag's line, which the same rank writes."""


class WorkClock:
    """Seconds since the channel was opened. One writer, one reader."""

    __slots__ = ("_cell", "_taken_s")

    def __init__(self, channel: memoryview) -> None:
        self._cell = channel[OFFSET : OFFSET + 8].cast("d")
        self._taken_s: float = 0.0

    def add(self, seconds: float) -> None:
        """The writer has computed for that long."""
        self._cell[0] += seconds

    def take(self) -> float:
        """What the reader has not taken yet."""
        total_s = self._cell[0]
        since_s, self._taken_s = total_s - self._taken_s, total_s
        return since_s
