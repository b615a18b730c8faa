"""simulate: every group of a planned deployment, in one of the two modes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from crosspool.planner.deployment import PlanInput
from crosspool.planner.layouts import Hosting
from crosspool.planner.planner import Planned, PlannedGroup
from crosspool.simulator.exact import simulate_exact
from crosspool.simulator.group import STREAMS, Layout, Patience
from crosspool.simulator.layouts import simulated_group
from crosspool.simulator.measured import MeasuredTable
from crosspool.simulator.passes import PassCost
from crosspool.simulator.pipeline import Span
from crosspool.simulator.result import GroupResult
from crosspool.simulator.sharing import twin_stations
from crosspool.simulator.steps import simulate_steps
from crosspool.simulator.workload import group_requests

Mode = Literal["exact", "steps"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationSettings:
    """What to simulate of a plan. Requests arrive in [start_s, start_s + duration_s) of the workload.

    drain: go on until all have ended; otherwise stop when the time is up. is_ahead: a lane's next decode step is handed
    out while the present one runs. prompts_wait: chunks of prompts begin once the decode steps under way of up to so
    many rows have ended, as weights ranks that fuse layers have it. patience_s, patience_token_s: what a layer's FFN of
    a prompt may take, and more for each of its tokens, before it goes before decode. prompts_share: they run beside
    decode rather than in turns, as long as their patience allows. hosting: names of the models of each GPU, in a
    monolithic layout; none: as planned. beside_share: of every FFN, on a weights rank that lies on the KV GPU (two
    pools, one KV GPU). pass_rows: ascending, the numbers of rows that decode's passes have (`passes.py`); none: as many
    as a step has.

    Raises ValueError for bad bounds.
    """

    mode: Mode = "steps"
    layout: Layout = "crosspool"
    order: str = "priority"
    duration_s: float = 60.0
    start_s: float = 0.0
    drain: bool = True
    seed: int = 0
    host_s: float = 0.0
    is_ahead: bool = False
    prompts_wait: int = 0
    patience_s: float = float("inf")
    patience_token_s: float = 0.0
    prompts_share: bool = False
    max_queue: int = 64
    hosting: Hosting | None = None
    beside_share: float = 0.0
    pass_rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in ("exact", "steps"):
            raise ValueError(f"mode {self.mode!r} is unknown; use exact (a minute or so) or steps (days)")
        if self.layout not in ("crosspool", "static", "elastic"):
            raise ValueError(f"layout {self.layout!r} is unknown; use crosspool, static or elastic")
        if not self.duration_s > 0:
            raise ValueError(f"duration is {self.duration_s} s; it must be above 0")
        for name in ("prompts_wait", "start_s", "host_s", "patience_s", "patience_token_s"):
            if not getattr(self, name) >= 0:  # so that NaN is refused as well
                raise ValueError(f"{name} is {getattr(self, name):g}; it must be 0 or more")
        self._check_mode()
        if self.prompts_share and (self.mode != "exact" or self.patience_s == float("inf")):
            raise ValueError(
                f"prompts share GPUs with decode for as long as their patience allows, which is {self.patience_s} s; "
                "give a patience, and mode exact"
            )
        if not 0 <= self.beside_share < 1 or (self.beside_share and self.layout != "crosspool"):
            raise ValueError(
                f"beside_share is {self.beside_share} with layout {self.layout}; give at least 0 and below 1, and "
                "layout crosspool"
            )
        if list(self.pass_rows) != sorted({rows for rows in self.pass_rows if rows > 0}):
            told = ",".join(map(str, self.pass_rows))
            raise ValueError(f"pass_rows are {told}; give numbers above 0, each larger than the one before")

    def _check_mode(self) -> None:
        """Raises ValueError for what is played put by put in a mode that has no puts, and for half a patience."""
        given: dict[str, float] = {"ahead": self.is_ahead, "prompts_wait": self.prompts_wait}
        if self.layout == "crosspool" and self.order != STREAMS:
            given |= self.patience_given
        self._refuse_in_steps(given)
        if self.patience_token_s > 0 and self.patience_s == float("inf"):
            raise ValueError("patience_token_us is added to patience_us, which is for ever; give that as well")

    @property
    def patience_given(self) -> dict[str, float]:
        """By flag; on streams of a GPU it is part of a chunk's speed beside decode, elsewhere played put by put."""
        return {"patience_us": self.patience_s < float("inf"), "patience_token_us": self.patience_token_s}

    def check_stations(self, num_stations: int) -> None:
        """Raises ValueError for the patience of streams where two pools have GPUs of their own."""
        if self.layout == "crosspool" and num_stations > 1:
            self._refuse_in_steps(self.patience_given)

    def _refuse_in_steps(self, given: Mapping[str, float]) -> None:
        names = [name for name, value in given.items() if value]
        if names and self.mode != "exact":
            raise ValueError(
                f"{' and '.join(names)} with mode {self.mode}, which has no puts and waits; use mode exact"
            )


def simulate(
    planned: Planned,
    plan_input: PlanInput,
    settings: SimulationSettings,
    *,
    measured: MeasuredTable | None = None,
    spans: dict[str, list[Span]] | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> list[GroupResult]:
    """Run every group. spans: filled by group name with each segment (mode exact). progress: (group, virtual time).

    Raises CapacityError and ValueError, in one line, for layouts and modes that do not go together.
    """
    if spans is not None and settings.mode != "exact":
        raise ValueError("a Chrome trace shows segments, which mode steps does not have; use mode exact")
    return [_simulate_group(group, plan_input, settings, measured, spans, progress) for group in planned.groups]


def _simulate_group(
    group: PlannedGroup,
    plan_input: PlanInput,
    settings: SimulationSettings,
    measured: MeasuredTable | None,
    spans: dict[str, list[Span]] | None,
    progress: Callable[[str, float], None] | None,
) -> GroupResult:
    simulated = simulated_group(
        group.models,
        group.split,
        plan_input,
        settings.layout,
        name=group.plan.name,
        max_queue=settings.max_queue,
        measured=measured,
        hosting=settings.hosting,
        beside_share=settings.beside_share,
    )
    settings.check_stations(len(simulated.stations))
    simulated = replace(
        simulated,
        order=settings.order,
        host_s=settings.host_s,
        is_ahead=settings.is_ahead,
        prompts_wait=settings.prompts_wait,
        patience=Patience(settings.patience_s, settings.patience_token_s),
        prompts_share=settings.prompts_share,
        stations=twin_stations(simulated.stations) if settings.prompts_share else simulated.stations,
    )
    if rows := settings.pass_rows:
        in_passes = (replace(model, cost=PassCost(model.cost, rows)) for model in simulated.models)
        simulated = replace(simulated, models=tuple(in_passes))
    requests = group_requests(
        group.models, start_s=settings.start_s, stop_s=settings.start_s + settings.duration_s, seed=settings.seed
    )
    stop_s = None if settings.drain else settings.duration_s
    tell = None if progress is None else partial(progress, simulated.name)
    if settings.mode == "steps":
        return simulate_steps(simulated, requests, stop_s=stop_s, progress=tell)
    into = spans.setdefault(simulated.name, []) if spans is not None else None
    return simulate_exact(simulated, requests, stop_s=stop_s, spans=into, progress=tell)
