"""Plans that agree with the simulator: its times are the plan's, and the split is the one it finds fastest."""

from __future__ import annotations

import pytest

from crosspool.errors import CapacityError
from crosspool.planner.deployment import parse_plan_input
from crosspool.planner.planner import plan_deployment
from crosspool.simulator.simulated_plan import plan_simulated
from crosspool.simulator.simulator import SimulationSettings, simulate

LENGTHS = {"prompt": 300, "output": 60, "prompt_cv": 0.5, "output_cv": 0.3}


def wanted(rate=1.0, **gpus):
    return parse_plan_input(
        {
            "gpus": {"kind": "h200", "count": 3, **gpus},
            "models": [
                {"model": "olmoe-1b-7b", "rate": rate, "lengths": LENGTHS},
                {"model": "deepseek-v2-lite", "rate": rate, "lengths": LENGTHS},
            ],
            "service": {"cost": "simulator"},
            "precision": 0.1,
        }
    )


def test_residences_of_plan_and_simulation_agree():
    given = wanted(kv=1)
    planned = plan_simulated(given)
    result = simulate(planned, given, SimulationSettings(duration_s=60.0))[0]
    for model in planned.plan.groups[0].models:
        assert model.mean_service_s == pytest.approx(result.models[model.name].residence.mean, rel=0.05)


def test_the_simulated_pool_holds_what_was_planned():
    """Frames held over time by the engine's own pool, at another seed: mean and P99 as the sampled demand has them."""
    given = wanted(rate=4.0, kv=1, count=2, memory="43GiB")
    planned = plan_simulated(given)
    result = simulate(planned, given, SimulationSettings(duration_s=150.0, seed=3))[0]
    (occupancy,) = result.occupancy.values()
    demand = planned.groups[0].demand
    assert demand is not None
    assert occupancy.mean * result.frame_bytes == pytest.approx(float(demand.samples.mean()), rel=0.15)
    bin_bytes = 20 << 20  # the simulation tells time in bins of a 2000th of its budget, by their upper edge
    assert 0 <= occupancy.quantile(0.99) * result.frame_bytes - 0.9 * demand.paged.value <= 2 * bin_bytes
    assert any("the simulated pool held" in note for note in planned.plan.notes)


def test_the_split_is_the_fastest_of_those_simulated():
    searched = plan_simulated(wanted()).plan
    assert searched.notes[0].startswith("split by simulation, mean time between tokens: 1 KV ")
    assert searched.notes[1].startswith("g0: the simulated pool held ")
    times = [float(part.split()[2]) for part in searched.notes[0].split(": ")[1].split(", ")]
    assert len(times) == 2
    assert len(searched.groups[0].kv_ranks) == 1 + times.index(min(times))


def test_what_fits_no_split_is_refused_with_the_numbers():
    with pytest.raises(CapacityError, match=r"deepseek-v2-lite needs 27\.8 GiB of FFN.*smallest set"):
        plan_simulated(wanted(memory="12GiB"))


def test_busy_pools_are_slower_than_the_roofline_alone_says():
    given = wanted(rate=8.0, kv=1)
    simulated = plan_simulated(given).plan.groups[0].models[0]
    alone = plan_deployment(wanted(rate=0.01, kv=1)).plan.groups[0].models[0]
    assert simulated.tbt_s > alone.tbt_s
