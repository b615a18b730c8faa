"""RankLinks: a rank's ends of the channels of its lanes, by lane and peer."""

from collections.abc import Callable

from crosspool.backends.base import Inlet, LaneLinks, NewLink, Outlet
from crosspool.cluster.channel import ChannelInlet, ChannelOutlet, WorkClock, a2f_part, f2a_part
from crosspool.cluster.messages import OpenChannels
from crosspool.cluster.worker import RankWorker
from crosspool.scheduler.step import StepHeader


class RankLinks:
    """Channels lie in the region that the parent gives both ends, or where the worker opens its own."""

    def __init__(self, worker: RankWorker, ring: Callable[[str], Callable[[], None]]) -> None:
        """ring(peer): what wakes the peer's host after a put."""
        self._worker = worker
        self._ring = ring
        self._outlets: dict[tuple[int, str], Outlet] = {}
        self._inlets: dict[tuple[int, str], Inlet] = {}
        self._clocks: dict[tuple[int, str], WorkClock] = {}  # none where channels lie on devices
        self._found: dict[tuple[int, tuple[str, ...], tuple[str, ...]], LaneLinks] = {}  # what `of` has given

    def open(self, message: OpenChannels) -> None:
        """Open the lane's channels with a peer, or new ones in their place."""
        self._found.clear()
        memory = message.region.map()
        message.region.close()
        key, ring = (message.lane, message.peer), self._ring(message.peer)
        if self._worker.links is not None:
            new = NewLink(message.lane, message.peer, memory, message.capacity, ring, message.is_far)
            self._outlets[key], self._inlets[key] = self._worker.links.open_link(new)
            return
        a2f, f2a = a2f_part(memory, message.capacity), f2a_part(memory, message.capacity)
        out, into = (a2f, f2a) if self._worker.is_kv and not message.is_far else (f2a, a2f)
        self._outlets[key] = ChannelOutlet(out, message.capacity, ring)
        self._inlets[key] = ChannelInlet(into, message.capacity)
        self._clocks[key] = WorkClock(f2a)

    def close(self, peer: str) -> None:
        """Drop the channels of every lane with a peer."""
        self._found.clear()
        for ends in (self._outlets, self._inlets, self._clocks):
            for key in [key for key in ends if key[1] == peer]:
                del ends[key]
        if self._worker.links is not None:
            self._worker.links.close_links(peer)

    def of(self, header: StepHeader, peers: tuple[str, ...], exchange: tuple[str, ...] = ()) -> LaneLinks:
        """A step's ends, to `peers` and to those of its exchange. Raises ValueError where one is missing."""
        key = (header.lane, peers, exchange)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._links(header, peers, exchange)
        return found

    def _links(self, header: StepHeader, peers: tuple[str, ...], exchange: tuple[str, ...]) -> LaneLinks:
        lane = header.lane
        missing = [peer for peer in (*peers, *exchange) if (lane, peer) not in self._outlets]
        if missing or not (peers or exchange):
            raise ValueError(f"lane {lane} has no channels for {header.model} to {', '.join(missing) or 'any rank'}")
        return LaneLinks(
            outlets={peer: self._outlets[lane, peer] for peer in peers},
            inlets={peer: self._inlets[lane, peer] for peer in peers},
            exchange_outlets={peer: self._outlets[lane, peer] for peer in exchange},
            exchange_inlets={peer: self._inlets[lane, peer] for peer in exchange},
        )

    def clocks(self, lane: int, links: LaneLinks) -> tuple[WorkClock, ...]:
        """The work clocks of the peers that a step waits for in every layer."""
        if not self._clocks:
            return ()
        return tuple(found for peer in links.outlets if (found := self._clocks.get((lane, peer))))
