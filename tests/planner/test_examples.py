"""The example files plan, and the catalogue knows every name in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from crosspool.planner.deployment import read_plan_input
from crosspool.planner.planner import plan_deployment

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "planning").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_plan_and_keep_their_promises(path):
    given = read_plan_input(path)
    plan = plan_deployment(given.model_copy(update={"precision": 0.2})).plan
    assert plan.num_gpus == given.gpus.count
    for group in plan.groups:
        assert group.coverage >= given.quantile
        for model in group.models:
            assert model.longest_context_tokens >= model.guaranteed_context_tokens
