"""How fast the simulator is, and how well its two modes agree.

    python -m benchmarks.bench_planner --only modes [--seconds 30]
    python -m benchmarks.bench_planner --only day --day-trace FILE

Layer-exact: events a second of the paper's three models on three H200 (1 KV, 2 weights). Modes: the same requests in
both, at loads from near idle to saturated. Day: a recorded day of many models, step-level, where a trace is given.
"""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.planning.simulated_day import day_groups, day_input
from benchmarks.report import Report
from crosspool.planner.deployment import PlanInput
from crosspool.planner.planner import PlannedGroup, plan_deployment
from crosspool.simulator.exact import simulate_exact
from crosspool.simulator.layouts import simulated_group
from crosspool.simulator.result import GroupResult
from crosspool.simulator.steps import simulate_steps
from crosspool.simulator.workload import group_requests

MODELS = ("qwen3-30b-a3b", "glm-4.7-flash", "deepseek-v2-lite")
RATES_RPS = (0.2, 0.8, 2.0, 4.0)
SEED = 2026
DAY = {"num_groups": 8, "group_size": 32, "num_kv": 4}


def load(rate_rps: float) -> tuple[PlannedGroup, PlanInput]:
    """The three models with ShareGPT-like lengths, planned."""
    lengths = {"prompt": 800, "output": 250}
    plan_input = PlanInput.model_validate(
        {
            "gpus": {"kind": "h200", "count": 3, "kv": 1},
            "precision": 0.1,
            "models": [{"model": name, "rate": rate_rps, "lengths": lengths} for name in MODELS],
        }
    )
    return plan_deployment(plan_input).groups[0], plan_input


def compare_modes(report: Report, seconds: float) -> None:
    """Mean TBT of both modes at each rate, and the events of the exact one a second."""
    events, wall_s, cpu_s, gaps = 0, 0.0, 0.0, []
    for rate in RATES_RPS:
        group, plan_input = load(rate)
        simulated = simulated_group(group.models, group.split, plan_input)
        requests = group_requests(group.models, start_s=0.0, stop_s=seconds, seed=SEED)
        begun, begun_cpu = time.perf_counter(), time.process_time()
        exact = simulate_exact(simulated, requests)
        wall_s += time.perf_counter() - begun
        cpu_s += time.process_time() - begun_cpu
        events += exact.num_events
        if exact.total.tbt.mean == 0.0:
            raise ValueError(
                f"no request arrives within {seconds:g} s at {rate:g} requests/s; take --seconds 10 or more"
            )
        steps = simulate_steps(simulated, requests)
        gaps.append(gap_percent(steps, exact))
        name = f"at_{rate:g}_rps"
        report.metric(f"exact_tbt_ms.{name}", exact.total.tbt.mean * 1e3)
        report.metric(f"modes_gap_percent.{name}", gaps[-1])
        report.metric(f"exact_ttft_ms.{name}", exact.total.ttft.mean * 1e3)
        report.metric(f"steps_ttft_ms.{name}", steps.total.ttft.mean * 1e3)
        report.metric(f"bubble_percent.{name}.kv", 100 * exact.bubble_share(0))
        report.metric(f"bubble_percent.{name}.weights", 100 * exact.bubble_share(1))
    report.metric(
        "sim_events_per_s.exact",
        events / wall_s,
        note=f"{events:,} events; by CPU time {events / cpu_s:,.0f}; asked for: 200,000 or more",
    )
    report.metric(
        "sim_modes_gap_percent", max(gaps), limit=2.0, note="largest over loads, of mean TBT; limit: asked for"
    )


def gap_percent(steps: GroupResult, exact: GroupResult) -> float:
    """Distance of the modes in mean TBT."""
    return 100 * abs(steps.total.tbt.mean / exact.total.tbt.mean - 1)


def run_day(report: Report, trace: Path) -> None:
    """Every group of the day, one after the other, until the last request has ended."""
    begun = time.perf_counter()
    plan_input = day_input(trace, **DAY)
    num_models = num_requests = num_events = num_steps = num_tokens = refused = 0
    busiest: GroupResult | None = None
    for index, group in enumerate(day_groups(plan_input)):
        simulated = simulated_group(group.models, group.split, plan_input, name=f"g{index}")
        requests = group_requests(group.models, start_s=0.0, stop_s=86400.0, seed=SEED)
        result = simulate_steps(simulated, requests)
        total = result.total
        assert total.num_finished + total.num_refused == len(requests)
        num_models += len(group.models)
        num_requests, refused = num_requests + len(requests), refused + total.num_refused
        num_events, num_steps = num_events + result.num_events, num_steps + result.num_steps
        num_tokens += total.num_tokens
        busiest = result if busiest is None or result.num_steps > busiest.num_steps else busiest
        print(f"{result.name}: {len(requests):,} requests, {result.num_steps:,} steps, {result.num_events:,} events")
    minutes = (time.perf_counter() - begun) / 60
    report.metric(
        f"sim_day_minutes.{num_models}", minutes, limit=15.0, note=f"{num_requests:,} requests; limit: asked for"
    )
    report.metric("day.engine_steps", num_steps)
    report.metric("day.events", num_events)
    report.metric("day.tokens", num_tokens)
    report.metric("day.refused", refused, note="context limits of the models")
    assert busiest is not None
    report.metric("day.busiest_group.tbt_ms", busiest.total.tbt.mean * 1e3)
    report.metric("day.busiest_group.tbt_p99_ms", busiest.total.tbt.quantile(0.99) * 1e3)
