"""What a request or a configuration may hold, and the one-line errors for what it may not."""

import pytest

from crosspool.core import SamplingParams
from crosspool.engine.config import EngineConfig
from crosspool.engine.expand import sequence_seed
from crosspool.engine.request import GenerationRequest

GOOD = {"request_id": "r", "model": "p", "prompt_token_ids": (1,), "sampling": SamplingParams(max_tokens=1)}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n", 0, "n is 0; it must be at least 1"),
        ("n", -2, "n is -2"),
        ("seed", -1, "seed is -1"),
        ("seed", 36893488147419103232, "seed is 36893488147419103232"),
        ("prompt_token_ids", (), "the prompt has no tokens"),
        ("stop", ("",), "empty string"),
        ("stop", ("", "END"), "empty string"),
        ("stop", tuple(str(index) for index in range(2000)), "2000 strings; at most 64"),
        ("stop", ("x" * 100_000,), "100000 characters; at most 4096"),
    ],
)
def test_a10_a34_a36_bad_requests_are_refused_by_name(field, value, message):
    with pytest.raises(ValueError, match=message) as refusal:
        GenerationRequest(**{**GOOD, field: value})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_queue", 0, "max_queue is 0"),
        ("num_decode_lanes", 0, "num_decode_lanes is 0"),
        ("kv_budget_bytes", 2**20, "less than two frames of 2097152 bytes; set it to 4194304"),
        ("host_budget_bytes", 2**20, "less than two frames of 2097152 bytes; set it to 4194304 or more, or to 0"),
        ("forecast_quantile", 1.5, "forecast_quantile is 1.5"),
        ("recovery_timeout_s", -1.0, "recovery_timeout_s is -1.0"),
    ],
)
def test_bad_configurations_are_refused_by_name(field, value, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{field: value})


def test_a_prefill_rank_has_one_lane() -> None:
    """Its models have one cache for the chunk that it computes."""
    with pytest.raises(ValueError, match=r"num_prefill_lanes is 2 for 1 prefill ranks.*set it to 1 or less"):
        EngineConfig(prefill_ranks=("p0",), num_prefill_lanes=2)
    EngineConfig(prefill_ranks=("p0", "p1"), num_prefill_lanes=2)


def test_seeds_of_a_request_differ_and_stay_in_range():
    seeds = {sequence_seed(seed, index) for seed in (0, 1, 2**63 - 1) for index in range(50)}
    assert len(seeds) == 150
    assert all(0 <= seed < 2**63 for seed in seeds)
