"""The lanes of one worker, by number."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from crosspool.backends.cuda.channels.link import Site
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.device.sm_partition import PrefillStreams
from crosspool.backends.cuda.steps.lane import Links, WorkerLane
from crosspool.backends.cuda.steps.lane_memory import WaitRule

logger = logging.getLogger(__name__)

PEER_TIMEOUT_S = 3.0
"""How long a load waits for a lane's peers to open their ends; without them, passes are captured at first steps."""


class WorkerLanes:
    """Each lane is made when it is first asked for.

    A thread that loads a model may look at them while the rank's loop makes more.
    """

    def __init__(
        self, site: Site, rule: WaitRule, kernels: Launcher, *, is_host_driven: bool = False, goes_ahead: bool = False
    ) -> None:
        """is_host_driven, goes_ahead: of `WorkerLane`."""
        self._site, self._rule, self._kernels = site, rule, kernels
        self._is_host_driven, self._goes_ahead = is_host_driven, goes_ahead
        self._lanes: dict[int, WorkerLane] = {}

    def __getitem__(self, number: int) -> WorkerLane:
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = WorkerLane(
                self._site,
                self._rule,
                self._kernels,
                is_host_driven=self._is_host_driven,
                goes_ahead=self._goes_ahead,
                has_prompts=number >= self._site.first_prompt_lane,
            )
        return lane

    def __iter__(self) -> Iterator[WorkerLane]:
        return iter(tuple(self._lanes.values()))

    def numbers(self) -> tuple[int, ...]:
        return tuple(self._lanes)

    def open_to(self, peers: Sequence[str]) -> Iterator[tuple[int, WorkerLane, Links]]:
        """In order of their numbers, those whose links with all of `peers` open in time."""
        for number, lane in sorted(self._lanes.items()):
            until_s = time.monotonic() + PEER_TIMEOUT_S
            links = tuple(lane.links[peer] for peer in peers if peer in lane.links)
            if len(links) < len(peers):
                continue
            while not (is_open := all(link.is_open() for link in links)) and time.monotonic() <= until_s:
                time.sleep(0.01)
            if is_open:
                yield number, lane, links
            else:
                logger.warning("%s: %s did not open channels yet; passes are captured later", lane.site.rank, peers)

    def prefill_streams(self) -> PrefillStreams:
        """The streams on which chunks most likely run: those of the last lane, since prefill lanes come last.

        Before one is open: streams like them, but not those of captures, which other loads may be at meanwhile.
        """
        last = max(self._lanes, default=-1)
        if last >= self._site.first_prompt_lane:
            return self._lanes[last].prefill_streams
        return self._spare_streams

    @cached_property
    def _spare_streams(self) -> PrefillStreams:
        return PrefillStreams(self._site.driver, self._site.device, self._site.partition)

    @cached_property
    def capture_streams(self) -> PrefillStreams:
        """Streams like them on which no lane runs: what another thread enqueues meanwhile would join a capture."""
        return PrefillStreams(self._site.driver, self._site.device, self._site.partition)

    def decodes_beside(self, lane: WorkerLane, now_s: float) -> bool:
        """Whether another lane runs passes, or did so just now (time.monotonic)."""
        return any(other.decodes(now_s) for other in self if other is not lane)

    def neighbours_of(self, lane: WorkerLane, *, is_fixed: bool) -> Callable[[], bool]:
        """What tells a chunk of the lane whether others decode beside it; is_fixed: as it is now, until the chunk ends.

        For a rank whose peer has the same GPU: a chunk that goes over to the partition half-way waits there for what it
        enqueued before, and was seen held up by the peer's kernel that spins for it.
        """
        if not is_fixed:
            return lambda: self.decodes_beside(lane, time.monotonic())
        decodes = self.decodes_beside(lane, time.monotonic())
        return lambda: decodes

    def close_links(self, peer: str) -> None:
        for lane in self:
            lane.close_link(peer)

    def drop(self, model: str) -> None:
        """Forget the passes of a model, after those under way have ended."""
        for lane in self:
            lane.drop(model)

    def memory_bytes(self) -> dict[str, int]:
        """What lanes hold beside their models: `graphs` and `channels`."""
        return {
            "graphs": sum(lane.graph_bytes for lane in self),
            "channels": sum(lane.channel_bytes for lane in self),
        }
