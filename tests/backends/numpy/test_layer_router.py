"""Experts chosen on the KV rank: the same tokens and the same cache, bit for bit; only what crosses is more."""

import numpy as np
import pytest

from crosspool.backends.numpy.layer_router import KVRouters, LayerRouter, choices_of
from crosspool.models.spec import MoEFFNSpec
from crosspool.weights_pool.loader import load_attention_weights
from tests.support.direct_lanes import SplitModel
from tests.support.split_and_whole import FRAME_BYTES, NUM_FRAMES, PAGE_TOKENS, model_dir, script, split
from tests.support.tiny_models import CONFIGS

ROUTERS = frozenset({"router", "router_bias", "choice_bias", "shared_expert_gate"})


@pytest.mark.parametrize("family", CONFIGS)
def test_tokens_and_cache_are_the_same_wherever_experts_are_chosen(family):
    beside = split(family, 2)
    here = SplitModel(
        model_dir(family), 2, page_tokens=PAGE_TOKENS, num_frames=NUM_FRAMES, frame_bytes=FRAME_BYTES, route="kv"
    )
    rng = np.random.default_rng(2)
    for step in script(family, seed=4, num_output=4):
        assert here.run(step, rng) == beside.run(step, rng)
    assert (here.attention._arena == beside.attention._arena).all()


def test_choices_cross_behind_the_rows_and_come_out_as_they_went_in():
    directory = model_dir("qwen2_moe")  # its shared expert is gated
    weights = load_attention_weights(directory, also=ROUTERS)
    layer = next(idx for idx, layer in enumerate(directory.spec.layers) if isinstance(layer.ffn, MoEFFNSpec))
    spec = directory.spec.layers[layer].ffn
    rows = np.random.default_rng(0).standard_normal((3, directory.spec.hidden_size), dtype=np.float32)
    joined = KVRouters(directory.spec, weights.layers).joined(layer, rows)
    assert joined.shape == (3, directory.spec.hidden_size + spec.choices_width)
    assert (joined[:, : directory.spec.hidden_size] == rows).all()
    found = choices_of(joined, directory.spec.hidden_size, spec)
    expected = LayerRouter(spec, weights.layers[layer])(rows)
    assert (found.ids == expected.ids).all()
    assert (found.weights == expected.weights).all()
    assert (found.scale == expected.scale).all()


def test_a_kv_rank_holds_no_router_unless_it_chooses():
    directory = model_dir("qwen3_moe")
    assert not any(ROUTERS & set(layer) for layer in load_attention_weights(directory).layers)
    assert all("router" in layer for layer in load_attention_weights(directory, also=ROUTERS).layers)
