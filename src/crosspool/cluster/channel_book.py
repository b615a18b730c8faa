"""ChannelBook: which channels are open, and which are missing. Pure; `cluster_channels.py` opens what it names."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from crosspool.cluster.base import ModelPlacement


@dataclass(frozen=True, slots=True)
class Link:
    """The two channels of one lane between two ranks, and the elements a slot of theirs holds.

    The first channel leads from `rank`, a KV rank, to `peer`: a weights rank, a prefill rank, or another KV rank.
    """

    lane: int
    rank: str
    peer: str
    capacity: int


class ChannelBook:
    """Open links. Sizes follow the models that are placed now: a wider model, or a further lane, opens new ones."""

    def __init__(
        self,
        num_lanes: int,
        max_tokens_per_step: int,
        *,
        hands_in_parts: bool = False,
        may_use: Callable[[int, str], bool] = lambda lane, peer: True,
    ) -> None:
        """hands_in_parts: earlier KV crosses to a prefill rank in parts that fit the channel; else at once.

        may_use: whether steps of a lane may need a peer.
        """
        self._may_use = may_use
        self._num_lanes, self._hands_in_parts = num_lanes, hands_in_parts
        self._max_tokens = max_tokens_per_step
        self._open: dict[tuple[int, str, str], int] = {}

    def needs_lane(self, lane: int) -> bool:
        """Whether the lane is new, so that `missing` now names links of it."""
        is_new = lane >= self._num_lanes
        self._num_lanes = max(self._num_lanes, lane + 1)
        return is_new

    def missing(self, placements: Iterable[ModelPlacement], is_up: Callable[[str], bool]) -> list[Link]:
        """Links to open so that every pair of ranks that shares a model, and is up, has them wide enough in every lane
        that may use them; `opened` takes note of each."""
        links = []
        for (rank, peer), capacity in self._capacities(placements).items():
            if not (is_up(rank) and is_up(peer)):
                continue
            for lane in range(self._num_lanes):
                key = (lane, rank, peer)
                if self._may_use(lane, peer) and self._open.get(key, 0) < capacity:
                    links.append(Link(*key, capacity))
        return links

    def opened(self, link: Link) -> None:
        """Its two ranks have it now."""
        self._open[link.lane, link.rank, link.peer] = link.capacity

    def rank_lost(self, rank: str) -> None:
        """Its links are gone."""
        self._open = {key: capacity for key, capacity in self._open.items() if rank not in key[1:]}

    def unused(self, placements: Iterable[ModelPlacement]) -> list[tuple[str, str]]:
        """Pairs (rank, peer) that no model needs any more; their links are now closed."""
        pairs = {key[1:] for key in self._open} - set(self._capacities(placements))
        self._open = {key: capacity for key, capacity in self._open.items() if key[1:] not in pairs}
        return sorted(pairs)

    def _capacities(self, placements: Iterable[ModelPlacement]) -> dict[tuple[str, str], int]:
        """The most elements that cross at once between each pair. Two KV ranks have one link, whoever leads a step."""
        found: dict[tuple[str, str], int] = {}
        for placement in placements:
            for home in placement.homes:
                rows = placement.crossing_width * self._max_tokens
                earlier = 0 if self._hands_in_parts else placement.context_tokens
                handed = placement.kv_row_width * max(self._max_tokens, earlier)
                pairs = dict.fromkeys(((home, peer) for peer in placement.weights_ranks), rows)
                pairs |= dict.fromkeys(((home, peer) for peer in placement.prefill_ranks), max(rows, handed))
                for peer in placement.shares(home):
                    pairs[min(home, peer), max(home, peer)] = placement.exchange_width * self._max_tokens
                for pair, capacity in pairs.items():
                    found[pair] = max(found.get(pair, 0), capacity)
        return found
