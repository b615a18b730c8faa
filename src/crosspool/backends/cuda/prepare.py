"""Captures a new model's common passes while it loads, so that its first steps do not."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from crosspool.backends.cuda.lane import Links, WorkerLane
from crosspool.backends.cuda.passes import BUCKETS

logger = logging.getLogger(__name__)

COMMON_BUCKETS = tuple(bucket for bucket in BUCKETS if bucket <= 8)
"""Decode rows captured before a model is ready; larger passes are captured at their first step."""

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
