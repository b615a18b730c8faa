"""How caches are cut over KV ranks, and what one request sees."""

from __future__ import annotations

import pytest

from crosspool.kv_pool.split import choose_kv_split
from crosspool.planner.catalogue import catalogue_facts
from crosspool.planner.parallelism import kv_parallelism, monolithic_share_seen


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("qwen3-30b-a3b", 1, "one"),
        ("qwen3-30b-a3b", 2, "heads"),
        ("qwen3-30b-a3b", 4, "heads"),
        ("qwen3-30b-a3b", 3, "tokens"),
        ("qwen3-30b-a3b", 8, "tokens"),
        ("glm-4.7-flash", 2, "tokens"),
        ("deepseek-v3", 8, "tokens"),
        ("olmoe-1b-7b", 8, "tokens"),
    ],
)
def test_heads_are_cut_where_they_divide_and_tokens_elsewhere(name, ranks, expected):
    assert kv_parallelism(catalogue_facts(name), ranks) == expected


def test_nothing_is_cut_where_one_rank_is_wanted():
    assert kv_parallelism(catalogue_facts("glm-4.7-flash"), 4, "one") == "one"


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "glm-4.7-flash", "olmoe-1b-7b", "gpt-oss-20b"])
def test_what_is_planned_can_be_served(name, ranks):
    """`kv_split` of a planned deployment is what the plan says; one that serve refuses would be no plan."""
    facts = catalogue_facts(name)
    planned = kv_parallelism(facts, ranks)
    assert choose_kv_split(facts.spec, ranks, planned, name) == planned


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"glm-4\.7-flash has 1 KV heads, which cannot be cut evenly over 2"):
        kv_parallelism(catalogue_facts("glm-4.7-flash"), 2, "heads")


@pytest.mark.parametrize(("heads", "gpus", "share"), [(1, 4, 0.25), (2, 4, 0.5), (4, 4, 1.0), (8, 5, 1.0), (4, 8, 0.5)])
def test_together_with_weights_a_request_sees_its_heads_part(heads, gpus, share):
    assert monolithic_share_seen(heads, gpus) == share
