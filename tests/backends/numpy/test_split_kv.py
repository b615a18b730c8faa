"""A model over several KV ranks gives what it gives on one, within 1e-5 of the largest logit, and the same tokens."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from crosspool.backends.numpy import attention_step
from crosspool.core import SamplingParams
from crosspool.kv_pool.geometry import page_geometry
from crosspool.models.directory import read_model_dir
from crosspool.weights_pool.loader import load_attention_weights, load_ffn_weights
from tests.support.model_size import num_parameters
from tests.support.monolithic import MonolithicModel
from tests.support.split_kv import FRAME_BYTES, NUM_FRAMES, PAGE_TOKENS, SplitKVModel, SplitPaging, repaged
from tests.support.step_script import Script
from tests.support.tiny_models import CONFIGS, write_tiny_model

TOLERANCE = 1e-5  # float32: partial attention rounds once more a layer
GREEDY = SamplingParams(max_tokens=50, temperature=0.0)
SEEDED = replace(GREEDY, temperature=1.1, seed=5, top_p=0.95)
MODELS = {
    **{family: {} for family in CONFIGS},
    "mqa": {"family": "qwen3_moe", "num_key_value_heads": 1},
    "mha": {"family": "qwen2_moe", "num_key_value_heads": 4},
    "sinks_4": {"family": "gpt_oss", "num_key_value_heads": 4, "num_attention_heads": 8},
}
"""Tiny models: every family, and more shapes of attention."""

_directories = TemporaryDirectory()


@cache
def model_dir(model):
    overrides = dict(MODELS[model])
    family = overrides.pop("family", model)
    path = write_tiny_model(Path(_directories.name) / model, family, tokenizer=False, **overrides)
    return read_model_dir(path)


@cache
def reference(model):
    directory = model_dir(model)
    return MonolithicModel(
        directory.spec,
        load_attention_weights(directory),
        [load_ffn_weights(directory, 0, 1)],
        page_tokens=PAGE_TOKENS,
        num_frames=NUM_FRAMES,
        frame_bytes=FRAME_BYTES,
    )


def script(model, seed, lengths=(5, 41, 17), num_output=12):
    spec = model_dir(model).spec
    rng = np.random.default_rng(seed)
    return Script(
        spec.family,
        page_geometry(spec, page_tokens=PAGE_TOKENS, frame_bytes=FRAME_BYTES, kv_dtype="float32"),
        [rng.integers(0, spec.vocab_size, length).tolist() for length in lengths],
        [GREEDY, SEEDED, GREEDY],
        num_output=num_output,
        num_frames=NUM_FRAMES,
        seed=seed,
    ).steps()


@pytest.fixture
def logits(monkeypatch):
    """Copies of the logits of every step from here on."""
    seen = []
    sample = attention_step.sample

    def recording(logits, rows):
        seen.append(logits.copy())
        return sample(logits, rows)

    monkeypatch.setattr(attention_step, "sample", recording)
    return seen


def run_whole(model, steps, logits):
    logits.clear()
    whole = reference(model)
    tokens = [whole.run(step) for step in steps]
    return tokens, list(logits)


def in_turns(num_ranks):
    return lambda idx: idx % num_ranks


def unevenly(seed):
    rng = np.random.default_rng(seed)
    return lambda idx: int(rng.integers(0, 4) // 2)  # ranks 0 and 1 only


def check(model, pools, choose, logits, seed, lengths=(5, 41, 17)):
    tokens, expected = run_whole(model, script(model, seed, lengths), logits)
    logits.clear()
    paging = SplitPaging(pools.placement, pools.geometry, NUM_FRAMES, choose)
    rng = np.random.default_rng(seed)
    results = [pools.run(step, rng) for step in repaged(script(model, seed, lengths), paging, pools.placement.kv_rank)]
    assert results == tokens
    assert len(logits) == len(expected) > 0
    for got, want in zip(logits, expected, strict=True):
        assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()
    return paging


@pytest.mark.parametrize("num_kv", [2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_tokens_over_ranks_equal_one_rank(model, num_kv, logits):
    pools = SplitKVModel(model_dir(model), "tokens", num_kv)
    paging = check(model, pools, in_turns(num_kv), logits, seed=num_kv)
    assert min(paging.num_pages.values()) > 0


@pytest.mark.parametrize("model", ["qwen3_moe", "glm4_moe_lite", "gpt_oss", "mqa"])
def test_pages_may_lie_as_unevenly_as_they_like(model, logits):
    pools = SplitKVModel(model_dir(model), "tokens", 3, num_weights=1, home=1)
    paging = check(model, pools, unevenly(2), logits, seed=8)
    assert 0 in paging.num_pages.values()


@pytest.mark.parametrize(
    ("model", "num_kv"),
    [(model, 2) for model in ("qwen3_moe", "mixtral", "glm4_moe", "gpt_oss", "llama", "qwen2_moe", "qwen3")]
    + [(model, num_kv) for model in ("qwen2_moe", "mha", "sinks_4") for num_kv in (3, 4)],
)
def test_heads_over_ranks_equal_one_rank(model, num_kv, logits):
    check(model, SplitKVModel(model_dir(model), "heads", num_kv, home=num_kv - 1), in_turns(1), logits, seed=num_kv)


@pytest.mark.parametrize("split", ["tokens", "heads"])
@pytest.mark.parametrize("home", [0, 1])
def test_any_rank_may_be_the_home(split, home, logits):
    check("qwen3_moe", SplitKVModel(model_dir("qwen3_moe"), split, 2, home=home), in_turns(2), logits, seed=3)


@pytest.mark.parametrize(
    ("model", "split"), [("qwen3_moe", "heads"), ("qwen3_moe", "tokens"), ("deepseek_v2", "tokens")]
)
def test_a_step_that_fails_anywhere_and_is_replayed_changes_nothing(model, split):
    undisturbed, pools = (SplitKVModel(model_dir(model), split, 2) for _ in range(2))
    rng = np.random.default_rng(1)
    steps = [
        repaged(script(model, 4), SplitPaging(pools.placement, pools.geometry, NUM_FRAMES, in_turns(2)), "kv0")
        for _ in range(2)
    ]
    for number, (step, same) in enumerate(zip(*steps, strict=True)):
        expected = undisturbed.run(step, rng)
        for attempt in range(int(rng.integers(0, 3))):
            pools.run(same.replayed(same.header.step_seq + attempt), rng, max_segments=int(rng.integers(0, 30)))
        assert pools.run(same.replayed(same.header.step_seq + 5), rng) == expected, f"step {number}"


def test_a_merge_in_another_order_or_without_its_weights_is_seen(logits, monkeypatch):
    """The control: the comparison notices a part that counts too much."""
    from crosspool.backends.numpy import split_tokens

    merge = split_tokens.merge

    def flat(parts, sinks):
        return merge([(values, np.where(np.isneginf(lse), lse, 0)) for values, lse in parts], sinks)

    monkeypatch.setattr(split_tokens, "merge", flat)
    pools = SplitKVModel(model_dir("qwen3_moe"), "tokens", 2)
    with pytest.raises(AssertionError):
        check("qwen3_moe", pools, in_turns(2), logits, seed=1)


def test_a_rank_without_pages_of_a_step_takes_no_part_in_it(logits):
    pools = SplitKVModel(model_dir("deepseek_v2"), "tokens", 2)
    check("deepseek_v2", pools, lambda idx: 0, logits, seed=2)
    assert pools.channels["kv0", "kv1"]._flag == 0
    assert pools.channels["kv1", "kv0"]._flag == 0


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v2"])
def test_a_share_that_lags_behind_steps_without_it_knows_of_them(model):
    """The home does not wait for it there: the next step may come before the share has run the last one."""
    swift, lagging = (SplitKVModel(model_dir(model), "tokens", 2, home=1) for _ in range(2))
    rng = np.random.default_rng(5)
    pairs = [
        repaged(script(model, 6, (5,)), SplitPaging(pools.placement, pools.geometry, NUM_FRAMES, in_turns(2)), "kv1")
        for pools in (swift, lagging)
    ]
    for step, same in zip(*pairs, strict=True):
        assert lagging.run(same, rng, is_lagging=True) == swift.run(step, rng)


def test_every_rank_says_what_it_holds():
    spec = model_dir("qwen2_moe").spec
    whole = 4 * num_parameters(spec, "kv")
    tokens = SplitKVModel(model_dir("qwen2_moe"), "tokens", 2)
    assert [rank.memory_bytes()["attention_weights"] for rank in tokens.kv.values()] == [whole, 0]
    heads = SplitKVModel(model_dir("qwen2_moe"), "heads", 2)
    home, share = (rank.memory_bytes()["attention_weights"] for rank in heads.kv.values())
    attention = 2 * share  # no bias of o in this family
    assert home + share == whole
    assert 0 < attention < whole
    assert heads.geometry.layer_bytes * 2 == tokens.geometry.layer_bytes


@pytest.mark.parametrize("split", ["tokens", "heads"])
def test_a_removed_model_leaves_nothing_on_any_rank(split):
    pools = SplitKVModel(model_dir("qwen3_moe"), split, 2)
    paging = SplitPaging(pools.placement, pools.geometry, NUM_FRAMES, in_turns(2))
    pools.run(next(repaged(script("qwen3_moe", 0), paging, "kv0")), np.random.default_rng(0))
    for worker in pools.kv.values():
        worker.remove_model("qwen3_moe")
        assert worker.memory_bytes()["attention_weights"] == 0
        assert not worker._sequences


def test_pages_of_the_wrong_rank_are_named():
    heads = SplitKVModel(model_dir("qwen3_moe"), "heads", 2)
    step = next(script("qwen3_moe", 0))
    with pytest.raises(ValueError, match=r"page .* of sequence \d: a page of qwen3_moe is \d+ frames on each of 2 KV"):
        next(heads.halves(replace(step, header=step.header._replace(kv_rank="kv0")))["kv0"])
    tokens = SplitKVModel(model_dir("qwen3_moe"), "tokens", 2)
    width = tokens.geometry.frames_per_page
    bad = tuple(range(NUM_FRAMES, NUM_FRAMES + width))  # the reserved frame of kv1
    rows = tuple(row._replace(new_pages=(bad,) * len(row.new_pages)) for row in step.rows)
    with pytest.raises(ValueError, match="frame 0 is reserved"):
        next(tokens.halves(replace(step, rows=rows))["kv1"])
