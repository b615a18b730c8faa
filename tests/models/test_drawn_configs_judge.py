"""Any config that a family can have, not only the usual one: a few random ones each, judged by transformers.

FAMILY_DRAWS (100) of each in the soak; FAMILY_SEED (0) is the first.
"""

from __future__ import annotations

import os

import pytest

from crosspool.models.families.registry import FAMILIES

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.judged_draw import compare_draw

QUICK = 12
DRAWS = int(os.environ.get("FAMILY_DRAWS", "100"))
SEED = int(os.environ.get("FAMILY_SEED", "0"))


@pytest.mark.judge
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_dozen_drawn_models_agree_with_transformers(tmp_path, family):
    for seed in range(QUICK):
        compare_draw(tmp_path / str(seed), family, seed)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_many_drawn_models_agree_with_transformers(tmp_path, family):
    for seed in range(SEED, SEED + DRAWS):
        compare_draw(tmp_path / str(seed), family, seed)
