"""PrefillRanks: which prefill rank a prefill lane uses, whose prompts it takes next, and which models it can hold."""

from collections.abc import Iterable
from collections.abc import Sequence as Items

from crosspool.engine.config import EngineConfig
from crosspool.engine.live_models import LiveModel
from crosspool.engine.prefill_chunks import Chunk
from crosspool.engine.rank_health import RankHealth
from crosspool.engine.served_model import ServedModel
from crosspool.errors import CapacityError
from crosspool.models.whole_size import whole_bytes
from crosspool.scheduler.residency import Residency, WaitingModel
from crosspool.units import format_bytes


class PrefillRanks:
    """The prefill ranks of a deployment; none: all prompts run in the pools.

    A rank that is away costs time alone: its lane's prompts run in the pools until it is back.
    """

    def __init__(self, config: EngineConfig, ranks: RankHealth) -> None:
        self._rank_of, self._ranks = config.prefill_rank_of, ranks
        self._residencies = {name: Residency(room_bytes=config.prefill_pool_bytes) for name in config.prefill_ranks}
        self._sizes: dict[str, int] = {}  # by model: what it takes there

    def of_lane(self, lane: int) -> str | None:
        """The rank of a prefill lane, up or not."""
        return self._rank_of.get(lane)

    def computes(self, rank: str, live: LiveModel) -> bool:
        """Whether the rank is up for the model and can hand over its KV: a page lies whole on the home."""
        if rank not in live.model.prefill_ranks or live.model.kv_split != "one":
            return False
        return self._ranks.are_up((rank,), live.model.name)

    def order(self, rank: str, live_models: Iterable[LiveModel], now_s: float) -> list[str]:
        """Models with prompts to run, in the order in which they should get the rank."""
        waiting = []
        for live in live_models:
            arrivals = [sequence.request.arrival_s for sequence in live.prefilling.values() if not sequence.in_step]
            if arrivals:
                waiting.append(WaitingModel(live.model.name, min(arrivals), self._bytes(live)))
        return self._residencies[rank].order(waiting, now_s)

    def take(self, rank: str, live: LiveModel) -> None:
        self._residencies[rank].take(live.model.name, self._bytes(live))

    def lost(self, rank: str) -> None:
        """A rank is away; a prefill rank comes back with no model in place."""
        if rank in self._residencies:
            self._residencies[rank].lost()

    def remove_model(self, name: str) -> None:
        self._sizes.pop(name, None)
        for residency in self._residencies.values():
            residency.forget(name)

    def _bytes(self, live: LiveModel) -> int:
        name = live.model.name
        if name not in self._sizes:
            self._sizes[name] = whole_bytes(live.model.spec)
        return self._sizes[name]

    @property
    def num_switches(self) -> dict[str, int]:
        """By rank: how often a model was brought in."""
        return {name: residency.num_switches for name, residency in self._residencies.items()}


def with_bounded_past(chunks: Items[Chunk], most: int) -> list[Chunk]:
    """The first chunks whose sequences have at most `most` tokens cached together, which cross in each layer."""
    found: list[Chunk] = []
    cached = 0
    for chunk in chunks:
        cached += chunk.sequence.num_cached_tokens
        if found and cached > most:
            break
        found.append(chunk)
    return found


def check_whole_model(model: ServedModel, others: Iterable[ServedModel], config: EngineConfig) -> None:
    """Raises CapacityError where the model, whole, is larger than the rank's room on its GPU, or than what `others`
    leave of the host's memory."""
    if not model.prefill_ranks:
        return
    size, room, host = whole_bytes(model.spec), config.prefill_pool_bytes, config.prefill_host_bytes
    if 0 < room < size:
        raise CapacityError(
            f"{model.name} takes {format_bytes(size)} whole and prefill_pool_bytes is {format_bytes(room)}; set at "
            f"least {format_bytes(size)}, or prefill inline"
        )
    held = {other.name: whole_bytes(other.spec) for other in others if other.prefill_ranks and other.name != model.name}
    if host is not None and sum(held.values()) + size > host:
        beside = f", beside {format_bytes(sum(held.values()))} of {', '.join(held)}" if held else ""
        raise CapacityError(
            f"{model.name} takes {format_bytes(size)} of host memory on each prefill rank{beside}, and each may use "
            f"{format_bytes(host)} of this machine's; unload a model, or serve with prefill inline"
        )
