"""Layouts on the same GPUs: the paper's placements on five of 40 GB, and what one request sees in each."""

from __future__ import annotations

import pytest

from crosspool.planner.catalogue import catalogue_facts
from crosspool.planner.layouts import (
    Room,
    compare_layouts,
    elastic_hosting,
    evaluate,
    seen_tokens,
    static_hosting,
)

NAMES = ("qwen3-30b-a3b", "glm-4.7-flash", "deepseek-v2-lite")
ROOM = Room(num_gpus=5, bytes_per_gpu=38 * 10**9)


def models():
    return [catalogue_facts(name) for name in NAMES]


def test_static_partition_is_the_papers():
    """Q Q G G D."""
    hosting = static_hosting(models(), ROOM)
    assert hosting == [["qwen3-30b-a3b"]] * 2 + [["glm-4.7-flash"]] * 2 + [["deepseek-v2-lite"]]


def test_elastic_pool_is_the_papers_up_to_the_order_of_gpus():
    """Q+D Q+G Q+G Q+G G+D."""
    hosting = elastic_hosting(models(), ROOM)
    assert hosting is not None
    short = sorted("+".join(sorted(name[0] for name in names)) for names in hosting)
    assert short == sorted(["d+q", "g+q", "g+q", "g+q", "d+g"])


def test_latent_caches_see_one_gpu_and_heads_all_of_them():
    glm, qwen = catalogue_facts("glm-4.7-flash"), catalogue_facts("qwen3-30b-a3b")
    free = [10e9, 12e9, 10e9, 10e9]
    assert seen_tokens(glm, free) == int(12e9 // glm.kv_bytes_per_token)
    assert seen_tokens(qwen, free) == int(4 * 10e9 // qwen.kv_bytes_per_token)
    assert seen_tokens(qwen, free * 2) == int(4 * 10e9 // qwen.kv_bytes_per_token)


def test_fixed_parts_divide_a_shared_gpu_by_demand():
    room = Room(num_gpus=1, bytes_per_gpu=140 * 10**9)
    pair = [catalogue_facts("deepseek-v2-lite"), catalogue_facts("olmoe-1b-7b")]
    hosting = static_hosting(pair, room)
    equal = evaluate("static", pair, room, hosting)
    skewed = evaluate("static", pair, room, hosting, {"deepseek-v2-lite": 3.0, "olmoe-1b-7b": 1.0})
    assert skewed.seen_tokens["deepseek-v2-lite"] == pytest.approx(
        1.5 * equal.seen_tokens["deepseek-v2-lite"], rel=1e-3
    )
    elastic = evaluate("elastic", pair, room, [["deepseek-v2-lite", "olmoe-1b-7b"]])
    assert elastic.seen_tokens["deepseek-v2-lite"] == pytest.approx(2 * equal.seen_tokens["deepseek-v2-lite"], rel=1e-3)


def test_weights_that_do_not_fit_are_said_to_not_fit():
    for result in compare_layouts(models(), Room(num_gpus=2, bytes_per_gpu=38 * 10**9)):
        assert not result.fits
        assert "cannot be placed on 2 GPUs" in result.note
        assert set(result.seen_tokens.values()) == {0}
