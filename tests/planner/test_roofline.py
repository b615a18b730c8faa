"""Roofline stage times against the published floors."""

from __future__ import annotations

import pytest

from crosspool.planner.catalogue import catalogue_facts
from crosspool.planner.gpus import GPUKind, gpu_kind
from crosspool.planner.roofline import stage_times, unique_expert_share

# A GPU of the data sheet's 4.8 TB/s without any fixed cost, which is what the published floors assume.
IDEAL = GPUKind(name="ideal", memory_bytes=1, bandwidth_gb_per_s=4800, link_gb_per_s=1e9, crossing_s=0, segment_s=0)


@pytest.mark.parametrize(
    ("name", "ffn_ms", "kv_pool_ms"),
    [
        ("qwen3-30b-a3b", (0.76, 1.47, 2.75, 4.88), 0.51),
        ("glm-4.7-flash", (0.93, 1.61, 2.84, 4.88), 0.56),
        ("deepseek-v2-lite", (0.78, 1.29, 2.17, 3.49), 0.24),
        ("mixtral-8x7b", (4.70, 8.22, 12.85, 16.91), 0.61),
        ("qwen3-next-80b-a3b", (0.71, 1.33, 2.53, 4.79), 0.77),
    ],
)
def test_floors_are_the_published_ones(name, ffn_ms, kv_pool_ms):
    facts = catalogue_facts(name)
    for batch, expected in zip((1, 2, 4, 8), ffn_ms, strict=True):
        times = stage_times(facts, IDEAL, batch=batch, context_tokens=0, num_kv_ranks=1, num_weights_ranks=1)
        # Routers are read in float32 here, in two bytes there: 3 % of the smallest experts.
        assert times.weights_busy_s * 1e3 == pytest.approx(expected, rel=0.035)
    assert times.kv_busy_s * 1e3 == pytest.approx(kv_pool_ms, rel=0.02)


def test_more_ranks_and_shorter_contexts_are_faster():
    facts, kind = catalogue_facts("glm-4.7-flash"), gpu_kind("h200")

    def step(context=30000, kv=1, weights=1):
        return stage_times(
            facts, kind, batch=4, context_tokens=context, num_kv_ranks=kv, num_weights_ranks=weights
        ).step_s

    assert step(kv=2) < step()
    assert step(weights=2) < step()
    assert step(context=1000) < step()


def test_a_batch_uses_more_experts_but_not_all():
    moe = next(ffn for ffn in catalogue_facts("qwen3-30b-a3b").ffns())
    assert unique_expert_share(moe, 1) == pytest.approx(8 / 128)
    assert unique_expert_share(moe, 8) * 128 == pytest.approx(51.6, abs=0.1)
    with pytest.raises(ValueError, match="GPU kind 'h300' is unknown; it must be one of"):
        gpu_kind("h300")
