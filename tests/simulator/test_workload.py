"""Requests of a simulation from traces and from rates."""

from __future__ import annotations

import pytest
import yaml

from crosspool.planner.deployment import PlanInput
from crosspool.planner.traffic import planned_models
from crosspool.simulator.driver import SimulatedRequest
from crosspool.simulator.workload import group_requests

RATES = """
gpus: {kind: h200, count: 2}
models:
  - {model: glm-4.7-flash, rate: 5, lengths: {prompt: 300, output: 50}, max_tokens: 64}
  - {model: deepseek-v2-lite, rate: 2, lengths: {prompt: 300, output: 50}}
  - qwen3-30b-a3b
"""

TRACE = """arrival_s,model,prompt_tokens,output_tokens
1.5,deepseek-v2-lite,100,10
0.5,glm-4.7-flash,200,0
9.0,deepseek-v2-lite,300,30
"""


def models(text):
    return planned_models(PlanInput.model_validate(yaml.safe_load(text)))


@pytest.fixture
def traced(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return models(
        "gpus: {kind: h200, count: 2}\n"
        f"trace: {{file: {path}, period: 10}}\n"
        "models: [glm-4.7-flash, deepseek-v2-lite]"
    )


def test_a_trace_gives_its_rows_in_order(traced):
    assert group_requests(traced, start_s=0.0, stop_s=5.0, seed=1) == [
        SimulatedRequest(0.5, "glm-4.7-flash", 200, 1, 1),
        SimulatedRequest(1.5, "deepseek-v2-lite", 100, 10, 10),
    ]


def test_a_window_has_a_clock_of_its_own_and_the_trace_repeats(traced):
    found = group_requests(traced, start_s=8.0, stop_s=11.0, seed=1)
    assert [(request.arrival_s, request.prompt_tokens) for request in found] == [(1.0, 300), (2.5, 200)]


def test_rates_give_arrivals_by_seed():
    loaded = models(RATES)
    first, again, other = (group_requests(loaded, start_s=0.0, stop_s=200.0, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert [request.arrival_s for request in first] == sorted(request.arrival_s for request in first)
    counts = {name: sum(request.model == name for request in first) for name in ("glm-4.7-flash", "deepseek-v2-lite")}
    assert counts["glm-4.7-flash"] == pytest.approx(1000, rel=0.15)
    assert counts["deepseek-v2-lite"] == pytest.approx(400, rel=0.2)
    assert sum(counts.values()) == len(first)  # a model without load has no requests
    asked = [request for request in first if request.model == "glm-4.7-flash"]
    assert all(request.max_tokens == max(64, request.output_tokens) for request in asked)
