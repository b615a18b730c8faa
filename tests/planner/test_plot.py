"""Pictures are written, one of each kind; without matplotlib the remedy is named."""

from __future__ import annotations

import sys

import pytest

from crosspool.planner.deployment import parse_plan_input
from crosspool.planner.planner import plan_deployment
from crosspool.planner.plot import _distribution, write_plots
from crosspool.units import GiB

WANTED = {
    "gpus": {"kind": "h200", "count": 2},
    "models": [{"model": "olmoe-1b-7b", "rate": 0.5, "lengths": {"prompt": 500, "output": 100}}, "deepseek-v2-lite"],
    "precision": 0.1,
}


def test_three_pictures_of_a_plan(tmp_path):
    pytest.importorskip("matplotlib")
    written = write_plots(plan_deployment(parse_plan_input(WANTED)), tmp_path / "plots")
    assert [path.name for path in written] == ["demand.png", "distribution.png", "contexts.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_the_rare_moments_of_a_pool_are_seen():
    pyplot = pytest.importorskip("matplotlib.pyplot", exc_type=ImportError)
    planned = plan_deployment(parse_plan_input(WANTED))
    (group,) = planned.groups
    assert group.demand is not None
    (axes,) = _distribution(pyplot, group, group.demand, planned.plan.quantile).axes
    assert axes.get_yscale() == "log"
    held_gib, percent = axes.get_lines()[0].get_data()
    for level in (0.5, 0.99, 0.999):
        beyond = percent[held_gib <= group.demand.level(level) / GiB]
        assert beyond[-1] <= 100 * (1 - level) + 1e-9, "no more moments than that hold more"
    pyplot.close("all")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'crosspool\[plots\]'"):
        write_plots(plan_deployment(parse_plan_input(WANTED)), tmp_path)
