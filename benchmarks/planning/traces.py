"""Budgets planned from one half of a recorded trace and held against the other half."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from crosspool.planner.catalogue import catalogue_facts, lookup
from crosspool.planner.demand import ModelLoad, along_path, mean_bytes
from crosspool.planner.holding import Holding
from crosspool.planner.pool_demand import estimate_pool
from crosspool.planner.request_table import SteadySpeed, table_from_trace
from crosspool.workload.arrivals import RecordedArrivals
from crosspool.workload.trace import Trace
from crosspool.workload.traces import read_trace

FILES = {
    "Azure 2023 conversation": "azure2023/AzureLLMInferenceTrace_conv.csv",
    "Azure 2023 code": "azure2023/AzureLLMInferenceTrace_code.csv",
    "Mooncake conversation": "mooncake_fast25/conversation_trace.jsonl.gz",
    "composed day, 36 models": "composed_cold_moe_24h.csv.gz",
}
QUANTILE = 0.95
NUM_MOMENTS = 50_000
SPEED = SteadySpeed(tbt_s=0.025, prefill_tokens_per_s=8000)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """One half planned, the other measured. over: share of its time above the budget.

    low, high: where 1 - quantile lies with 95 % confidence, by a binomial at the number of independent moments that the
    planned half is worth.
    """

    planned: str
    rates_rps: tuple[float, float]
    mean_bytes: tuple[float, float]
    budget_bytes: float
    over: float
    low: float
    high: float
    effective_samples: float

    @property
    def is_inside(self) -> bool:
        return self.low <= self.over <= self.high


def held_out_halves(folder: Path, file: str, seed: int) -> Iterator[HeldOut]:
    """Both ways round."""
    trace = read_trace(folder / file)
    middle = trace.duration_s / 2
    halves = [trace.window(0.0, middle), trace.window(middle, trace.duration_s + 1e-6)]
    yield _held_out("first", halves[0], halves[1], seed)
    yield _held_out("second", halves[1], halves[0], seed)


def _held_out(name: str, planned: Trace, held_out: Trace, seed: int) -> HeldOut:
    demand = estimate_pool(trace_loads(planned), quantile=QUANTILE, precision=0.005, seed=seed)
    loads = trace_loads(held_out)
    moments = np.linspace(0.0, held_out.duration_s, NUM_MOMENTS, endpoint=False)
    pool = np.zeros(NUM_MOMENTS)
    for load in loads:
        pool += along_path(load, np.random.default_rng(0), moments).paged
    effective = demand.paged.effective_samples
    half_width = 1.96 * (QUANTILE * (1 - QUANTILE) / effective) ** 0.5
    return HeldOut(
        planned=name,
        rates_rps=(planned.num_requests / planned.duration_s, held_out.num_requests / held_out.duration_s),
        mean_bytes=(demand.mean_bytes, sum(map(mean_bytes, loads))),
        budget_bytes=demand.paged.value,
        over=float((pool > demand.paged.value).mean()),
        low=max(0.0, 1 - QUANTILE - half_width),
        high=1 - QUANTILE + half_width,
        effective_samples=effective,
    )


def trace_loads(trace: Trace) -> list[ModelLoad]:
    """A trace's models by the catalogue (Qwen3 for names it does not know), 25 ms a token, prefill 8,000 tokens/s."""
    loads = []
    for name in trace.models:
        part = trace.of_model(name)
        if not part.num_requests:
            continue
        model = catalogue_facts(name if lookup(name) else "qwen3-30b-a3b")
        geometry = model.geometry(2 << 20)
        holding = Holding(
            policy="forecast",
            kv_bytes_per_token=model.kv_bytes_per_token,
            page_tokens=geometry.page_tokens,
            page_bytes=geometry.page_bytes,
            state_bytes=model.state_bytes,
        )
        arrivals = RecordedArrivals(times_s=part.arrival_s, period_s=trace.duration_s)
        loads.append(ModelLoad(name=name, arrivals=arrivals, requests=table_from_trace(part, SPEED), holding=holding))
    return loads
