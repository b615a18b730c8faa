"""`weights` and the defaults that depend on the backend."""

from __future__ import annotations

import pytest

from crosspool.deployment.load import load_deployment


def test_random_weights_need_gpus():
    with pytest.raises(ValueError, match="weights is random with backend numpy; only the CUDA backend"):
        load_deployment({"weights": "random"})
    assert load_deployment({"weights": "random", "backend": "cuda"}).pools.weights == "random"


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [({}, 512), ({"backend": "cuda"}, 8192), ({"backend": "cuda", "max_num_batched_tokens": 96}, 96)],
)
def test_a_prefill_step_is_as_large_as_the_backend_likes(flags, tokens):
    assert load_deployment(flags).scheduling.max_num_batched_tokens == tokens
