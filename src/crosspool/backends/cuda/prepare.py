"""Captures a new model's passes while it loads, so that its steps do not.

A capture may wait for the device. Where a KV rank and a weights rank have one process and GPU, the one may be capturing
its pass of a step while the other's, which waits for it, holds the device: both then stand still until a deadline.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from crosspool.backends.cuda.lane import Links, WorkerLane

logger = logging.getLogger(__name__)

PEER_TIMEOUT_S = 3.0
"""How long a load waits for peers to open their ends. Without them, first steps take some milliseconds more."""


def open_lanes(
    lanes: Sequence[WorkerLane], peers: Sequence[str], pause: Callable[[float], None] = time.sleep
) -> Iterator[tuple[WorkerLane, Links]]:
    """Lanes whose links with all of `peers` open in time."""
    until_s = time.monotonic() + PEER_TIMEOUT_S
    for lane in lanes:
        links = tuple(lane.links[peer] for peer in peers if peer in lane.links)
        if len(links) < len(peers):
            continue
        while not all(link.is_open() for link in links):
            if time.monotonic() > until_s:
                logger.warning("%s: %s did not open channels yet; passes are captured later", lane.site.rank, peers)
                return
            pause(0.01)
        yield lane, links
