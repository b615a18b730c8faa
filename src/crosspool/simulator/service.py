"""Service times from the simulator, for the planner: speeds that the traffic would really see.

The planner looks for speeds at which its cost model and its demand agree. A simulation of the traffic agrees with
itself already: this cost model answers the same whatever speeds it is shown, and the planner settles at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from zlib import crc32

import numpy as np

from crosspool.engine.config import EngineConfig
from crosspool.engine.served_model import ServedModel
from crosspool.errors import CapacityError
from crosspool.planner.deployment import PlanInput
from crosspool.planner.gpus import gpu_kind
from crosspool.planner.request_table import SteadySpeed
from crosspool.planner.service import CostModel, Speeds, Traffic
from crosspool.planner.speeds import CostFactory
from crosspool.simulator.cost import PooledCost
from crosspool.simulator.driver import SimulatedRequest
from crosspool.simulator.group import SimulatedGroup, SimulatedModel
from crosspool.simulator.measures import ModelMeasures
from crosspool.simulator.steps import simulate_steps

REQUESTS_PER_MODEL = 200
"""Of the model with the lowest rate, as far as MAX_REQUESTS allows."""

MAX_REQUESTS = 4000
AMPLE_FRAMES = 1 << 18
"""Frames of the simulated pool: speeds are wanted for a pool that is large enough, which is what is planned."""


def simulated_cost(plan_input: PlanInput) -> CostFactory:
    """A cost factory for `plan_deployment` that asks the step-level simulator."""

    def factory(num_kv: int, num_weights: int) -> CostModel:
        return SimulatedCost(plan_input=plan_input, num_kv=num_kv, num_weights=num_weights)

    return factory


@dataclass(slots=True)
class SimulatedCost:
    """Speeds of traffic on so many KV and weights GPUs. Each set of models and rates is simulated once."""

    plan_input: PlanInput
    num_kv: int
    num_weights: int
    _known: dict[tuple[tuple[str, float], ...], Speeds] = field(default_factory=dict)

    def __call__(self, traffic: Sequence[Traffic]) -> Speeds:
        """Raises CapacityError where more arrives than is served."""
        key = tuple((item.facts.name, item.rate_rps) for item in traffic)
        if key not in self._known:
            self._known[key] = self._simulate(traffic)
        return self._known[key]

    def _simulate(self, traffic: Sequence[Traffic]) -> Speeds:
        engine = self.plan_input.engine
        config = EngineConfig(
            kv_budget_bytes=AMPLE_FRAMES * engine.frame_bytes,
            frame_bytes=engine.frame_bytes,
            num_decode_lanes=engine.decode_lanes,
            num_prefill_lanes=engine.prefill_lanes,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_queue=MAX_REQUESTS,
        )
        group = SimulatedGroup(
            name="g0", layout="crosspool", models=tuple(self._model(item) for item in traffic), config=config
        )
        slowest = min(item.rate_rps for item in traffic)
        total = sum(item.rate_rps for item in traffic)
        seconds = min(REQUESTS_PER_MODEL / slowest, MAX_REQUESTS / total)
        result = simulate_steps(group, self._requests(traffic, seconds), stop_s=2 * seconds)
        if result.num_unfinished > 0.05 * result.total.num_arrived + engine.max_num_seqs:
            raise CapacityError(
                f"{total:g} requests/s of {len(traffic)} models are more than {self.num_kv} KV and {self.num_weights} "
                f"weights GPUs serve: {result.num_unfinished} of {result.total.num_arrived} simulated requests were "
                "left over; lower the rates, or add GPUs"
            )
        return {item.facts.name: _speed(result.models[item.facts.name], item) for item in traffic}

    def _model(self, item: Traffic) -> SimulatedModel:
        geometry = item.facts.geometry(self.plan_input.engine.frame_bytes)
        served = ServedModel(
            name=item.facts.name,
            spec=item.facts.spec,
            directory=Path(item.facts.name),
            weights_ranks=("weights",),
            page_tokens=geometry.page_tokens,
            frames_per_page=geometry.frames_per_page,
            frame_bytes=geometry.frame_bytes,
            kv_rank="kv",
            kv_dtype=item.facts.spec.weight_format.dtype,
        )
        kind = gpu_kind(self.plan_input.gpus.kind)
        cost = PooledCost(item.facts, kind, num_kv=self.num_kv, num_weights=self.num_weights)
        return SimulatedModel(served=served, cost=cost)

    def _requests(self, traffic: Sequence[Traffic], seconds: float) -> list[SimulatedRequest]:
        """Poisson arrivals of each model's rows. Rows beyond the model's own context are left out."""
        found = []
        for item in traffic:
            rng = np.random.default_rng([self.plan_input.seed, crc32(item.facts.name.encode())])
            count = max(2, ceil(item.rate_rps * seconds))
            arrivals = np.sort(rng.uniform(0.0, seconds, count))
            table = item.requests
            fitting = np.flatnonzero(table.prompt_tokens + table.max_tokens <= item.facts.max_context)
            if not len(fitting):
                raise ValueError(f"no request of {item.facts.name} fits its own context of {item.facts.max_context}")
            rows = fitting[rng.integers(0, len(fitting), count)]
            columns = (arrivals, table.prompt_tokens[rows], table.output_tokens[rows], table.max_tokens[rows])
            for arrival, prompt, output, asked in zip(*(column.tolist() for column in columns), strict=True):
                found.append(SimulatedRequest(arrival, item.facts.name, max(1, prompt), max(1, output), max(1, asked)))
        return sorted(found, key=lambda request: request.arrival_s)


def _speed(measures: ModelMeasures, item: Traffic) -> SteadySpeed:
    """Time between tokens and prefill speed that give the simulated mean residence."""
    tbt_s = measures.tbt.mean if measures.tbt.count else measures.residence.mean
    prompt, output = float(item.requests.prompt_tokens.mean()), float(item.requests.output_tokens.mean())
    before_s = max(1e-6, measures.residence.mean - output * tbt_s)
    return SteadySpeed(tbt_s=tbt_s, prefill_tokens_per_s=max(1.0, prompt) / before_s)
