"""ChannelBook: which channels are open, and which are missing. Pure; `rank_cluster.py` opens what it names."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from crosspool.cluster.base import ModelPlacement


@dataclass(frozen=True, slots=True)
class Link:
    """The two channels of one lane between a KV rank and a weights rank, and the elements a slot of theirs holds."""

    lane: int
    kv_rank: str
    weights_rank: str
    capacity: int


class ChannelBook:
    """Open links. Sizes follow the models that are placed now: a wider model, or a further lane, opens new ones."""

    def __init__(self, num_lanes: int, max_tokens_per_step: int) -> None:
        self._num_lanes = num_lanes
        self._max_tokens = max_tokens_per_step
        self._open: dict[tuple[int, str, str], int] = {}

    def needs_lane(self, lane: int) -> bool:
        """Whether the lane is new, so that `missing` now names links of it."""
        is_new = lane >= self._num_lanes
        self._num_lanes = max(self._num_lanes, lane + 1)
        return is_new

    def missing(self, placements: Iterable[ModelPlacement], is_up: Callable[[str], bool]) -> list[Link]:
        """Links to open so that every pair of ranks that shares a model, and is up, has them wide enough; now open."""
        links = []
        for (kv_rank, weights_rank), hidden_size in _widths(placements).items():
            if not (is_up(kv_rank) and is_up(weights_rank)):
                continue
            capacity = hidden_size * self._max_tokens
            for lane in range(self._num_lanes):
                key = (lane, kv_rank, weights_rank)
                if self._open.get(key, 0) < capacity:
                    self._open[key] = capacity
                    links.append(Link(*key, capacity))
        return links

    def rank_lost(self, rank: str) -> None:
        """Its links are gone."""
        self._open = {key: capacity for key, capacity in self._open.items() if rank not in key[1:]}

    def unused(self, placements: Iterable[ModelPlacement]) -> list[tuple[str, str]]:
        """Pairs (KV rank, weights rank) that no model needs any more; their links are now closed."""
        pairs = {key[1:] for key in self._open} - set(_widths(placements))
        self._open = {key: capacity for key, capacity in self._open.items() if key[1:] not in pairs}
        return sorted(pairs)


def _widths(placements: Iterable[ModelPlacement]) -> dict[tuple[str, str], int]:
    """The widest hidden size that crosses between each pair."""
    widths: dict[tuple[str, str], int] = {}
    for placement in placements:
        for weights_rank in placement.weights_ranks:
            pair = (placement.kv_rank, weights_rank)
            widths[pair] = max(widths.get(pair, 0), placement.hidden_size)
    return widths
