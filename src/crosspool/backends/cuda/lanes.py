"""The lanes of one worker, by number."""

from collections.abc import Iterator, Sequence

from crosspool.backends.cuda.lane import Links, WorkerLane
from crosspool.backends.cuda.lane_memory import WaitRule
from crosspool.backends.cuda.launch import Launcher
from crosspool.backends.cuda.link import Site
from crosspool.backends.cuda.prepare import open_lanes
from crosspool.backends.cuda.sm_partition import PrefillStreams


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
                self._site, self._rule, self._kernels, is_host_driven=self._is_host_driven, goes_ahead=self._goes_ahead
            )
        return lane

    def __iter__(self) -> Iterator[WorkerLane]:
        return iter(tuple(self._lanes.values()))

    def numbers(self) -> tuple[int, ...]:
        return tuple(self._lanes)

    def open_to(self, peers: Sequence[str]) -> Iterator[tuple[int, WorkerLane, Links]]:
        """In order of their numbers, those whose links with all of `peers` open in time (`prepare.py`)."""
        for number, lane in sorted(self._lanes.items()):
            for _, links in open_lanes([lane], peers):
                yield number, lane, links

    def prefill_streams(self) -> PrefillStreams:
        """The streams on which chunks most likely run: those of the last lane, since prefill lanes come last."""
        if self._lanes:
            return self._lanes[max(self._lanes)].prefill_streams
        return PrefillStreams(self._site.driver, self._site.device, self._site.partition)

    def decodes_beside(self, lane: WorkerLane, now_s: float) -> bool:
        """Whether another lane runs passes, or did so just now (time.monotonic)."""
        return any(other.decodes(now_s) for other in self if other is not lane)

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
