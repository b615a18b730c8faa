"""Service times from the simulator in the planner's loop."""

from __future__ import annotations

import pytest
import yaml

from crosspool.errors import CapacityError
from crosspool.planner.deployment import PlanInput
from crosspool.planner.planner import plan_deployment
from crosspool.simulator.service import simulated_cost

INPUT = """
gpus: {kind: h200, count: 3, kv: 1}
precision: 0.2
models:
  - {model: qwen3-30b-a3b, rate: 0.5, lengths: {prompt: 400, output: 100}}
  - {model: deepseek-v2-lite, rate: 0.5, lengths: {prompt: 400, output: 100}}
"""


def plan(text=INPUT, simulated=True):
    plan_input = PlanInput.model_validate(yaml.safe_load(text))
    return plan_deployment(plan_input, simulated_cost(plan_input) if simulated else None).plan


def test_a_plan_by_simulated_speeds_is_near_the_roofline_at_low_load():
    by_simulation, by_roofline = plan(), plan(simulated=False)
    for model in by_simulation.groups[0].models:
        other = by_roofline.groups[0].model(model.name)
        assert model.mean_service_s == pytest.approx(other.mean_service_s, rel=0.15)
    assert plan().groups[0].required_bytes == by_simulation.groups[0].required_bytes  # the same every time


def test_busy_models_wait_for_each_other_in_the_simulation():
    busy = plan(INPUT.replace("rate: 0.5", "rate: 3"))
    for model in busy.groups[0].models:
        assert model.tbt_s > 1.05 * plan().groups[0].model(model.name).tbt_s


def test_more_than_can_be_served_is_refused_with_the_numbers():
    with pytest.raises(CapacityError, match="simulated requests were left over; lower the rates, or add GPUs"):
        plan(INPUT.replace("rate: 0.5", "rate: 60"))
