"""Served random weights are one model, however it is cut and whenever it is drawn."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.loading.random_slices import cut, draw_share  # noqa: E402
from crosspool.models.families.registry import spec_from_config  # noqa: E402
from tests.support.tiny_models import CONFIGS  # noqa: E402

pytestmark = pytest.mark.judge

CPU = torch.device("cpu")


def test_the_slices_of_a_share_are_those_of_the_whole():
    spec = spec_from_config(
        {**CONFIGS["deepseek_v2"], "model_type": "deepseek_v2", "hidden_size": 64, "num_hidden_layers": 2}
    )
    told = []
    _, whole = draw_share(spec, "weights", CPU, lambda done, total: told.append((done, total)))
    assert len(whole) == spec.num_layers
    assert told[-1][0] <= told[-1][1]
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    for index in range(2):
        _, part = draw_share(spec, "weights", CPU, lambda done, total: None, index, 2)
        for own, tensors in zip(part, whole, strict=True):
            for name, tensor in tensors.items():
                assert torch.equal(own[name], cut(name, tensor, index, 2)), name


def test_both_pools_shares_are_drawn_apart():
    spec = spec_from_config(
        {**CONFIGS["qwen3_moe"], "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2}
    )
    model, layers = draw_share(spec, "kv", CPU, lambda done, total: None)
    again, _ = draw_share(spec, "kv", CPU, lambda done, total: None)
    assert "embed" in model
    assert all("expert_down" not in tensors for tensors in layers)
    assert all(torch.equal(model[name], again[name]) for name in model)


def test_whole_tensors_are_gone_before_memory_is_given_back(monkeypatch):
    """The allocator can return only what nothing lies in: else a rank's slices keep the memory of whole layers."""
    import weakref

    from crosspool.backends.cuda.loading import random_slices

    spec = spec_from_config(
        {**CONFIGS["qwen3_moe"], "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 3}
    )
    whole, alive, plain = [], [], random_slices.cut

    def watched(name, tensor, *rest):
        if name == "expert_down":
            whole.append(weakref.ref(tensor))
        return plain(name, tensor, *rest)

    monkeypatch.setattr(random_slices, "cut", watched)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive.append(sum(ref() is not None for ref in whole)))
    draw_share(spec, "weights", CPU, lambda done, total: None, 0, 2, (3.0, 1.0))
    assert alive == [0, 0, 0]
