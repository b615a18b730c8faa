"""Both attention kinds, paged and in steps, against whole sequences by the definition; arenas are poisoned with NaN."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosspool.backends.numpy import attention as attention_module
from crosspool.backends.numpy.attention import attend, attend_row, softmax_parts
from crosspool.backends.numpy.attention_gqa import GQAAttention
from crosspool.backends.numpy.attention_mla import MLAAttention
from crosspool.backends.numpy.rotary import RotaryTable
from crosspool.models.spec import DenseFFNSpec, GQASpec, LayerSpec, MLASpec, ModelSpec, RopeSpec
from crosspool.models.tensors import model_tensors
from tests.support.paging import Pages, caches_for, geometry_for, poisoned_arena, step_slots
from tests.support.plain_attention import plain_gqa, plain_mla

HIDDEN = 24
EPS = 1e-5


def gqa(**options):
    values = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 8, "softmax_scale": 0.3} | options
    return GQASpec(rope=RopeSpec(theta=100.0, dim=values.pop("rope_dim", 8)), **values)


def mla(q_lora_rank=None, kv_lora_rank=12, interleaved=True, **options):
    return MLASpec(
        num_heads=3,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=kv_lora_rank,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
        rope=RopeSpec(theta=100.0, dim=4, interleaved=interleaved),
        softmax_scale=0.3,
        **options,
    )


SPECS = {
    "mha": gqa(num_kv_heads=6),
    "mqa": gqa(num_kv_heads=1),
    "head norm": gqa(qk_norm="head"),
    "full norm": gqa(qk_norm="full"),
    "partial rope, biases": gqa(rope_dim=4, qkv_bias=True, o_bias=True),
    "window": gqa(sliding_window=5),
    "window and sinks": gqa(sliding_window=7, sinks=True, qkv_bias=True),
    "sinks": gqa(sinks=True),
    "mla": mla(),
    "mla with q_lora": mla(q_lora_rank=10),
    "mla with biases": mla(q_lora_rank=10, qkv_bias=True),
    "mla wide latent, pairs apart": mla(kv_lora_rank=20, interleaved=False),
}


def random_weights(spec, seed):
    model = ModelSpec(
        family="test",
        vocab_size=8,
        hidden_size=HIDDEN,
        layers=(LayerSpec(attention=spec, ffn=DenseFFNSpec(intermediate_size=16)),),
        norm_eps=EPS,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        dtype="float32",
    )
    rng = np.random.default_rng(seed)
    return {
        tensor.name: (rng.standard_normal(tensor.shape) / np.sqrt(tensor.shape[-1]) * 2).astype(np.float32)
        for tensor in model_tensors(model)
        if tensor.layer == 0 and tensor.pool == "kv"
    }


def packed(spec, weights):
    return GQAAttention(spec, weights, EPS) if isinstance(spec, GQASpec) else MLAAttention(spec, weights)


def plain(spec, weights, x):
    return plain_gqa(spec, weights, x, EPS) if isinstance(spec, GQASpec) else plain_mla(spec, weights, x)


def run_in_steps(spec, weights, inputs, schedule, page_tokens, seed):
    """Outputs of every sequence, run by `schedule`: steps of (sequence, number of tokens) rows."""
    geometry = geometry_for(spec, 3, page_tokens)
    arena = poisoned_arena(600, geometry.frame_bytes)
    pages = Pages(geometry, len(arena), seed)
    tables = [pages.table(len(x)) for x in inputs]
    cache = caches_for(spec, geometry, arena)[2]
    layer, rotary = packed(spec, weights), RotaryTable(spec.rope)
    done = [0] * len(inputs)
    outputs = [np.empty((0, HIDDEN)) for _ in inputs]
    for step in schedule:
        firsts = [done[sequence] for sequence, _ in step]
        counts = [count for _, count in step]
        slots = step_slots([tables[sequence] for sequence, _ in step], firsts, counts, page_tokens)
        x = np.concatenate([inputs[sequence][done[sequence] :][:count] for sequence, count in step])
        result = run_step(layer, x, rotary, cache, slots)
        assert result.dtype == np.float32
        for row, (sequence, count) in zip(slots.rows, step, strict=True):
            outputs[sequence] = np.concatenate([outputs[sequence], result[row.start : row.stop]])
            done[sequence] += count
    return outputs


def run_step(layer, x, rotary, cache, slots):
    """One token at an odd position runs as a vector, any other step as rows."""
    if len(x) == 1 and slots.positions[0] % 2:
        turns = rotary.turns(slots.positions, layer.num_rotated_heads)
        return layer(x[0], turns[0], cache, slots)[None]
    return layer(x, rotary.turns(slots.positions), cache, slots)


def random_schedule(lengths, rng):
    """Steps of one token a row, or of chunks, over random subsets of the sequences that are not done."""
    left = dict(enumerate(lengths))
    while left:
        chosen = rng.permutation(list(left))[: rng.integers(1, len(left) + 1)].tolist()
        is_decode = rng.random() < 0.5
        step = [(sequence, 1 if is_decode else int(rng.integers(1, left[sequence] + 1))) for sequence in chosen]
        for sequence, count in step:
            left[sequence] -= count
            if not left[sequence]:
                del left[sequence]
        yield step


@pytest.mark.fuzz
@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=max(40, settings.default.max_examples // 3))
@given(
    seed=st.integers(0, 2**32),
    page_tokens=st.sampled_from([1, 4, 16, 64]),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
)
def test_any_schedule_equals_the_whole_sequence(name, seed, page_tokens, lengths):
    rng = np.random.default_rng(seed)
    spec = SPECS[name]
    weights = random_weights(spec, seed)
    inputs = [rng.standard_normal((length, HIDDEN)).astype(np.float32) for length in lengths]
    outputs = run_in_steps(spec, weights, inputs, random_schedule(lengths, rng), page_tokens, seed)
    for x, output in zip(inputs, outputs, strict=True):
        assert output == pytest.approx(plain(spec, weights, x.astype(np.float64)), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", ["head norm", "window and sinks", "mla"])
def test_a_page_a_token_equals_one_page(name):
    spec = SPECS[name]
    weights = random_weights(spec, 1)
    x = np.random.default_rng(1).standard_normal((1, 20, HIDDEN)).astype(np.float32)
    schedule = [[(0, 9)], *[[(0, 1)]] * 11]
    small, large = (run_in_steps(spec, weights, x, schedule, page_tokens, 1)[0] for page_tokens in (1, 64))
    assert np.abs(small - large).max() <= 1e-6


@pytest.mark.parametrize("name", ["head norm", "window and sinks"])
def test_long_chunks_are_cut_into_blocks_of_queries(name, monkeypatch):
    spec = SPECS[name]
    weights = random_weights(spec, 2)
    x = np.random.default_rng(2).standard_normal((1, 40, HIDDEN)).astype(np.float32)
    whole = run_in_steps(spec, weights, x, [[(0, 40)]], 16, 0)[0]
    monkeypatch.setattr(attention_module, "MAX_SCORES", 6 * 40 * 7)
    assert np.abs(run_in_steps(spec, weights, x, [[(0, 40)]], 16, 0)[0] - whole).max() <= 1e-5


def test_absorbed_and_expanded_agree_and_both_are_taken():
    spec = mla(kv_lora_rank=20)
    weights = random_weights(spec, 3)
    layer = MLAAttention(spec, weights)
    x = np.random.default_rng(3).standard_normal((1, 40, HIDDEN)).astype(np.float32)
    long, short = step_slots([np.array([[1]])] * 2, [0, 0], [40, 3], 64).rows
    assert layer._expands(long)
    assert not layer._expands(short)
    by_chunk = {chunk: [[(0, min(chunk, 40 - start))] for start in range(0, 40, chunk)] for chunk in (40, 3, 1)}
    outputs = [run_in_steps(spec, weights, x, by_chunk[chunk], 16, 0)[0] for chunk in by_chunk]
    for first, second in itertools.pairwise(outputs):
        assert np.abs(first - second).max() <= 1e-5


@pytest.mark.parametrize("name", ["head norm", "window", "mla with q_lora"])
def test_one_token_as_a_vector_and_as_a_row_agree(name):
    spec = SPECS[name]
    layer, rotary = packed(spec, random_weights(spec, 6)), RotaryTable(spec.rope)
    x = np.random.default_rng(6).standard_normal((1, HIDDEN)).astype(np.float32)
    geometry = geometry_for(spec, 3, 4)
    arena = poisoned_arena(20, geometry.frame_bytes)
    cache = caches_for(spec, geometry, arena)[2]
    table = Pages(geometry, len(arena), 0).table(8)
    cache.write(
        np.random.default_rng(7).standard_normal((7, spec.kv_elements_per_token)).astype(np.float32),
        step_slots([table], [0], [7], 4),
    )
    slots = step_slots([table], [7], [1], 4)
    as_row = layer(x, rotary.turns(slots.positions), cache, slots)[0]
    as_vector = layer(x[0], rotary.turns(slots.positions, layer.num_rotated_heads)[0], cache, slots)
    assert as_vector.shape == (HIDDEN,)
    assert np.abs(as_vector - as_row).max() <= 1e-6 * np.abs(as_row).max() + 1e-7


def rows_of_lengths(lengths, spec, seed):
    """Queries of one token each, a cache that holds that many slots of each row, and the step's slots."""
    rng = np.random.default_rng(seed)
    geometry = geometry_for(spec, 3, 4)
    arena = poisoned_arena(200, geometry.frame_bytes)
    cache = caches_for(spec, geometry, arena)[2]
    pages = Pages(geometry, len(arena), seed)
    tables = [pages.table(length) for length in lengths]
    rows = rng.standard_normal((sum(lengths), spec.kv_elements_per_token)).astype(np.float32)
    cache.write(rows, step_slots(tables, [0] * len(lengths), lengths, 4))
    query = rng.standard_normal((len(lengths), spec.num_kv_heads, 2, spec.head_dim)).astype(np.float32)
    return query, cache, step_slots(tables, [length - 1 for length in lengths], [1] * len(lengths), 4)


@pytest.mark.parametrize("lengths", [(5, 6, 9), (40, 3, 2), (1, 1)])
def test_rows_together_and_one_by_one_agree(lengths):
    query, cache, slots = rows_of_lengths(lengths, gqa(), 8)
    together = attend(query, cache, slots)
    for idx, row in enumerate(slots.rows):
        alone = attend_row(query[idx : idx + 1], cache, replace(row, start=0, stop=1))[0]
        assert np.abs(together[idx] - alone).max() <= 1e-6


@pytest.mark.parametrize(
    ("scores", "overwrites"),
    [([1.0, 2.0, -3.0], False), ([59.0, -80.0, 0.0], False), ([200.0, 199.0, 0.0], True), ([-95.0, -96.5], True)],
)
def test_a_softmax_is_exact_whatever_its_range(scores, overwrites):
    given_scores = np.array([[scores, [0.5] * len(scores)]], dtype=np.float32)
    wide = given_scores.astype(np.float64)
    expected = np.exp(wide - wide.max(axis=-1, keepdims=True))
    expected /= expected.sum(axis=-1, keepdims=True)
    weights, totals = softmax_parts(given_scores, None)
    assert (weights is given_scores) == overwrites  # both ways are taken
    assert weights / totals == pytest.approx(expected, rel=1e-5, abs=1e-30)


def test_scores_of_any_size_do_not_overflow():
    spec = gqa(sinks=True)
    weights = random_weights(spec, 4)
    weights["q"] *= 1e4
    weights["sinks"][:] = 200.0
    x = np.random.default_rng(4).standard_normal((1, 10, HIDDEN)).astype(np.float32)
    for schedule in ([[(0, 10)]], [[(0, 1)]] * 10):
        assert np.isfinite(run_in_steps(spec, weights, x, schedule, 4, 0)[0]).all()
