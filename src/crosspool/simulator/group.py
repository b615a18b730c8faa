"""SimulatedGroup: the models of one group, the engine that serves them, and what their steps cost where."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from crosspool.engine.config import EngineConfig
from crosspool.engine.engine_core import EngineCore
from crosspool.engine.served_model import ServedModel
from crosspool.planner.roofline import StageTimes
from crosspool.scheduler.order import ORDER_POLICIES
from crosspool.scheduler.step import StepHeader
from crosspool.simulator.cost import StepCost, StepWork
from crosspool.simulator.pipeline import Route
from crosspool.simulator.sharing import USUAL, Sharing

Layout = Literal["crosspool", "static", "elastic"]
STREAMS = "streams"
ORDERS = (*ORDER_POLICIES, STREAMS)
"""Order policies of the workers, and plain streams: no order at all, what runs at once shares the GPU."""


POOLS = Route(kv=0, weights=1)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a segment of a prompt steps aside for decode (mode exact: `weights_rank/patience.py` on GPUs).

    piece_s, token_s: what a layer's FFN of a chunk may take, waiting included: a constant, and for each of its tokens.
    """

    piece_s: float = float("inf")
    token_s: float = 0.0

    def of(self, header: StepHeader, times: StageTimes) -> float:
        """Seconds that a segment of the step waits before it outranks every priority. Decode never does."""
        if header.phase == "decode":
            return float("inf")
        return max(0.0, self.allowed_s(header) - times.ffn_s)

    def allowed_s(self, header: StepHeader) -> float:
        """What a layer's FFN of the chunk may take."""
        return self.piece_s + header.num_tokens * self.token_s


FOR_EVER = Patience()


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedModel:
    """One model. route: its stations in the two pools. gpus: where a monolithic layout has its shards,
    of which `replica_gpus` in a row hold a sequence's cache together. sharing: what its decode and prompts cost each
    other where they run at once."""

    served: ServedModel
    cost: StepCost
    route: Route = POOLS
    gpus: tuple[int, ...] = ()
    replica_gpus: int = 1
    sharing: Sharing = USUAL

    def times(self, work: StepWork, *, has_neighbours: bool) -> StageTimes:
        """Stage times of a step, alone or beside others."""
        times = self.cost.times(work)
        return times.slower(self.cost.beside_others(work)) if has_neighbours else times

    @property
    def name(self) -> str:
        return self.served.name


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedGroup:
    """A group under one engine. stations: names, in the order that routes count them; for monolithic layouts the GPUs.

    host_s: from the end of a step to the start of the next, the engine's own time. is_ahead: decode steps are handed
    out while those before them run, as the server does (mode exact). prompts_wait: a chunk of a prompt begins once the
    decode steps under way of up to so many rows have ended, which are fused until then (mode exact). prompts_share:
    they run beside decode, on the second half of the stations, rather than in turns (mode exact). prepare: called with
    the core once the models are added; monolithic layouts put their own pages in.
    """

    name: str
    layout: Layout
    models: tuple[SimulatedModel, ...]
    config: EngineConfig
    stations: tuple[str, ...] = ("kv", "weights")
    order: str = "priority"
    host_s: float = 0.0
    is_ahead: bool = False
    prompts_wait: int = 0
    patience: Patience = FOR_EVER
    prompts_share: bool = False
    prepare: Callable[[EngineCore], None] | None = None

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order {self.order!r} is unknown; use one of {', '.join(ORDERS)}")

    @property
    def by_name(self) -> dict[str, SimulatedModel]:
        return {model.name: model for model in self.models}

    def make_core(self) -> EngineCore:
        core = EngineCore(self.config)
        for model in self.models:
            core.add_model(model.served)
        if self.prepare is not None:
            self.prepare(core)
        return core
