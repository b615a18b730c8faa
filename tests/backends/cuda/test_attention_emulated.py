"""Decode attention, run on the CPU, against float64 arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.kernels.attention import AttentionScratch, attention_decode  # noqa: E402
from crosspool.backends.cuda.kernels.attention_variants import choose_variant, key_value_dims, num_splits  # noqa: E402
from crosspool.backends.cuda.kernels.combine import takes_up  # noqa: E402
from crosspool.backends.cuda.kernels.gemv import gemv  # noqa: E402
from crosspool.backends.cuda.kernels.rope import RopeTable  # noqa: E402
from crosspool.kv_pool.geometry import PageGeometry  # noqa: E402
from tests.backends.cuda.attention_cases import ATTENTIONS, fill, gqa, one_layer_pages, project, reference, slot  # noqa: E402
from tests.backends.cuda.decoding import relative_error, shuffled_cache  # noqa: E402
from tests.backends.cuda.drawn import CPU, ROUNDED, draw, nan  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402

pytestmark = pytest.mark.judge


@pytest.mark.parametrize("how", ["one_row_per_sequence", "any_shape", "neither"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_equals_softmax_over_the_cache(name, how):
    check_attention(ATTENTIONS[name], how, EmulatedKernels(), page_tokens=48)


@pytest.mark.parametrize("page_tokens", [64, 40, 36])
@pytest.mark.parametrize("name", ["mla_16_heads", "mla_20_heads"])
def test_warpgroups_attend_over_latents(name, page_tokens):
    """Whole tiles come by the copy engine where no eight slots cross a page, else by all threads."""
    kernels = EmulatedKernels()
    check_attention(ATTENTIONS[name], "one_row_per_sequence", kernels, page_tokens=page_tokens)
    assert [kernel for kernel, _, _ in kernels.launches if kernel.endswith("_wide")]


def test_without_warpgroups_latents_take_the_other_kernels():
    kernels = EmulatedKernels(is_hopper=False)
    check_attention(ATTENTIONS["mla_16_heads"], "one_row_per_sequence", kernels, page_tokens=64)
    assert not [kernel for kernel, _, _ in kernels.launches if kernel.endswith("_wide")]


def test_what_lanes_cannot_turn_is_made_ready_before():
    kernels = EmulatedKernels()
    check_attention(ATTENTIONS["gqa_d64"], "one_row_per_sequence", kernels, page_tokens=48)
    ran = [kernel for kernel, _, _ in kernels.launches]
    assert "gqa_rope_cache" in ran
    assert "attention_gqa_d64_h8_ready" in ran


def check_attention(spec, how, kernels, *, page_tokens):
    geometry = PageGeometry(
        num_layers=3,
        elements_per_token_layer=spec.kv_elements_per_token,
        element_bytes=2,
        page_tokens=page_tokens,
        frame_bytes=2 * page_tokens * spec.kv_elements_per_token * 2,
    )
    lengths = [1, 440, 231]
    cache = shuffled_cache(geometry, 3, 450, CPU)
    rows = draw(3, 450, spec.kv_elements_per_token, seed=5)
    fill(cache, 2, rows, [length - 1 for length in lengths])
    splits = 3
    positions = torch.tensor(lengths, dtype=torch.int32) - 1
    rope = RopeTable.allocate(spec.rope, 3, CPU)
    rope.update(kernels, positions)
    inputs, queries, newest, _keep = project(spec, rope, positions)
    for row, length in enumerate(lengths):
        rows[row, length - 1] = newest[row].bfloat16()
    _, value_dim = key_value_dims(spec)
    out = nan(3, spec.num_heads, value_dim, dtype=torch.bfloat16)
    sinks = draw(spec.num_heads, seed=7) if getattr(spec, "sinks", False) else None
    assert choose_variant(spec) is not None
    most = 3 * splits * spec.num_heads
    scratch = AttentionScratch(nan(most * value_dim), nan(most * 2), nan(most * 600, dtype=torch.bfloat16))
    attention_decode(
        kernels,
        spec,
        inputs,
        cache,
        2,
        positions,
        torch.tensor(lengths, dtype=torch.int32),
        out,
        scratch,
        splits=splits,
        sinks=sinks,
        one_row_per_sequence=how == "one_row_per_sequence",
        any_shape=how == "any_shape",
    )
    expected = torch.stack([reference(spec, queries[i], rows[i, :length], sinks) for i, length in enumerate(lengths)])
    assert relative_error(out, expected) < 2 * ROUNDED
    for row, length in enumerate(lengths):
        assert relative_error(slot(cache, 2, row, length - 1), newest[row]) < ROUNDED


@pytest.mark.parametrize(("length", "used"), [(64, 1), (128, 2), (256, 2), (513, 3), (577, 4)])
def test_short_contexts_go_into_few_splits(length, used):
    """Two multiprocessors and four splits: a block a multiprocessor up to two tiles of 64 slots a split, then all."""
    spec = gqa(8, 1, 128)
    geometry = one_layer_pages(spec, 64)
    cache = shuffled_cache(geometry, 1, length, CPU)
    fill(cache, 0, draw(1, length, spec.kv_elements_per_token), [length])
    kernels, positions = EmulatedKernels(num_sms=2), torch.tensor([length - 1], dtype=torch.int32)
    rope = RopeTable.allocate(spec.rope, 1, CPU)
    rope.update(kernels, positions)
    inputs, _queries, _newest, _keep = project(spec, rope, positions)
    most = 4 * spec.num_heads
    scratch = AttentionScratch(nan(most * 128), torch.zeros(most * 2), nan(most * 128, dtype=torch.bfloat16))
    out = nan(1, 8, 128, dtype=torch.bfloat16)
    attention_decode(
        kernels, spec, inputs, cache, 0, positions, positions + 1, out, scratch, splits=4, one_row_per_sequence=True
    )
    assert (scratch.partial_ml.view(4, spec.num_heads, 2)[:, 0, 1] > 0).sum() == used
    assert not out.isnan().any()


@pytest.mark.parametrize("how", ["one_row_per_sequence", "any_shape", "neither"])
@pytest.mark.parametrize("name", ["gqa_d128_group_of_8", "gqa_window_sinks", "mla_20_heads"])
def test_a_tokens_attention_has_the_same_bits_in_every_batch(name, how):
    """A lone token's splits are blocks of their own; in a batch one block takes several, of other tokens others."""
    spec, lengths = ATTENTIONS[name], [700, 70, 450, 1]
    geometry = one_layer_pages(spec, 64)
    cache = shuffled_cache(geometry, 4, 700, CPU)
    fill(cache, 0, draw(4, 700, spec.kv_elements_per_token, seed=5), [length - 1 for length in lengths])
    kernels = EmulatedKernels(num_sms=7)
    splits = num_splits(spec, kernels.num_sms)
    _, value_dim = key_value_dims(spec)
    sinks = draw(spec.num_heads, seed=7) if getattr(spec, "sinks", False) else None
    all_positions = torch.tensor(lengths, dtype=torch.int32) - 1

    def attended(rows):
        positions = all_positions[rows]
        rope = RopeTable.allocate(spec.rope, len(rows), CPU)
        rope.update(kernels, positions)
        most = len(rows) * splits * spec.num_heads
        scratch = AttentionScratch(nan(most * value_dim), nan(most * 2), nan(most * 600, dtype=torch.bfloat16))
        out = nan(len(rows), spec.num_heads, value_dim, dtype=torch.bfloat16)
        inputs, _queries, _newest, _keep = project(spec, rope, positions, rows)
        attention_decode(
            kernels,
            spec,
            inputs,
            replace(cache, frame_table=cache.frame_table[rows].contiguous()),
            0,
            positions,
            positions + 1,
            out,
            scratch,
            splits=splits,
            sinks=sinks,
            one_row_per_sequence=how == "one_row_per_sequence",
            any_shape=how == "any_shape",
        )
        return out

    together = attended([0, 1, 2, 3])
    grids = [
        grid[1] for kernel, grid, _ in kernels.launches if kernel.startswith("attention") and "combine" not in kernel
    ]
    for row in range(4):
        assert torch.equal(attended([row])[0], together[row])
    assert torch.equal(attended([0, 2])[1], together[2])
    assert grids[0] < splits or how == "any_shape", "the batch takes as many blocks a token as a lone token"


@pytest.mark.parametrize("backwards", [False, True])
def test_a_block_with_all_splits_of_a_group_merges_them_with_the_same_bits(backwards):
    """Eight blocks a token: 32 and 30 splits are as many groups as blocks, the last of them short; 11 are too few."""
    spec, lengths = ATTENTIONS["mla_20_heads"], [2048, 700, 1910, 1]
    geometry = one_layer_pages(spec, 64)
    cache = shuffled_cache(geometry, 4, 2048, CPU)
    fill(cache, 0, draw(4, 2048, spec.kv_elements_per_token, seed=5), [length - 1 for length in lengths])
    kernels = EmulatedKernels(num_sms=33, backwards=backwards)
    splits = num_splits(spec, kernels.num_sms)
    assert splits == 32

    def attended(rows):
        positions = torch.tensor([lengths[row] - 1 for row in rows], dtype=torch.int32)
        rope = RopeTable.allocate(spec.rope, len(rows), CPU)
        rope.update(kernels, positions)
        most = len(rows) * splits * spec.num_heads
        scratch = AttentionScratch(nan(most * 512), nan(most * 2), nan(len(rows) * 20 * 576, dtype=torch.bfloat16))
        out = nan(len(rows), spec.num_heads, 512, dtype=torch.bfloat16)
        inputs, _queries, _newest, _keep = project(spec, rope, positions, rows)
        one = replace(cache, frame_table=cache.frame_table[rows].contiguous())
        attention_decode(
            kernels,
            spec,
            inputs,
            one,
            0,
            positions,
            positions + 1,
            out,
            scratch,
            splits=splits,
            one_row_per_sequence=True,
        )
        left = scratch.partial_ml.view(len(rows), splits, spec.num_heads, 2)[:, :, 0, 1]
        return out, (~left.isnan()).sum(dim=1).tolist()

    together, left = attended([0, 1, 2, 3])
    assert left == [8, 11, 8, 1]
    for row, used in enumerate([32, 11, 30, 1]):
        alone, [left_alone] = attended([row])
        assert left_alone == used
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("name", ["gqa_d128_group_of_8", "mla_16_heads"])
def test_tokens_of_one_sequence_see_each_other(name, backwards):
    spec, tokens, first = ATTENTIONS[name], 4, 61
    geometry = one_layer_pages(spec, 16)
    one = shuffled_cache(geometry, 1, first + tokens, CPU)
    cache = replace(one, frame_table=one.frame_table.expand(tokens, -1, -1).contiguous())
    rows = draw(1, first + tokens, spec.kv_elements_per_token, seed=5)
    fill(cache, 0, rows, [first])
    kernels = EmulatedKernels(backwards=backwards)
    positions = torch.arange(first, first + tokens, dtype=torch.int32)
    rope = RopeTable.allocate(spec.rope, tokens, CPU)
    rope.update(kernels, positions)
    inputs, queries, newest, _keep = project(spec, rope, positions)
    rows[0, first:] = newest.bfloat16()
    _, value_dim = key_value_dims(spec)
    out = nan(tokens, spec.num_heads, value_dim, dtype=torch.bfloat16)
    most = tokens * 2 * spec.num_heads
    scratch = AttentionScratch(nan(most * value_dim), nan(most * 2), nan(most * 300, dtype=torch.bfloat16))
    attention_decode(kernels, spec, inputs, cache, 0, positions, positions + 1, out, scratch, splits=2)
    expected = torch.stack([reference(spec, queries[i], rows[0, : first + i + 1], None) for i in range(tokens)])
    assert relative_error(out, expected) < 2 * ROUNDED


@pytest.mark.parametrize(("rows", "tokens", "backwards"), [(128, 1, False), (128, 2, True), (256, 2, False)])
def test_values_taken_up_behind_the_merge_have_the_bits_of_the_product_alone(rows, tokens, backwards):
    """A short and a long context: one round of loads, and two, of splits that are not all used."""
    spec, lengths = ATTENTIONS["mla_20_heads"], [4700, 70][:tokens]
    geometry = one_layer_pages(spec, 64)
    kernels, splits = EmulatedKernels(num_sms=80, backwards=backwards), 80
    cache = shuffled_cache(geometry, tokens, 4700, CPU)
    fill(cache, 0, draw(2, 4700, spec.kv_elements_per_token, seed=5), [length - 1 for length in lengths])
    positions = torch.tensor(lengths, dtype=torch.int32) - 1
    rope = RopeTable.allocate(spec.rope, tokens, CPU)
    rope.update(kernels, positions)
    inputs, _queries, _newest, _keep = project(spec, rope, positions, list(range(tokens)))
    value_up = draw(spec.num_heads, rows, 512, seed=11)
    assert takes_up(kernels, value_up, 1)
    assert not takes_up(kernels, value_up, 2), "the quicker way for one token"
    beside = EmulatedKernels()
    beside.has_clusters = False
    assert not takes_up(beside, value_up, 1), "no cluster starts there"

    def attended(width, **options):
        most = tokens * splits * spec.num_heads
        scratch = AttentionScratch(nan(most * 512), nan(most * 2), nan(tokens * 20 * 576, dtype=torch.bfloat16))
        out = nan(tokens, spec.num_heads, width, dtype=torch.bfloat16)
        attention_decode(
            kernels,
            spec,
            inputs,
            cache,
            0,
            positions,
            positions + 1,
            out,
            scratch,
            splits=splits,
            one_row_per_sequence=True,
            **options,
        )
        return out

    alone = nan(tokens, spec.num_heads, rows, dtype=torch.bfloat16)
    gemv(kernels, value_up, attended(512), alone)
    assert torch.equal(attended(rows, value_up=value_up), alone)
