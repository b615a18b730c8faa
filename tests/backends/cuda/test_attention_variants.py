"""How much shared memory attention's blocks ask for, and which of them merge splits."""

from __future__ import annotations

import pytest

from crosspool.backends.cuda.kernels.attention_variants import (
    GQA_VARIANTS,
    MLA_VARIANTS,
    SPLIT_GROUP,
    choose_variant,
    num_blocks,
    num_splits,
    widened,
)
from crosspool.models.spec import MLASpec, RopeSpec

LATENTS = MLASpec(
    num_heads=20,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope=RopeSpec(theta=10000.0, dim=64),
    softmax_scale=192**-0.5,
)
VARIANTS = [variant for table in (GQA_VARIANTS, MLA_VARIANTS) for variants in table.values() for variant in variants]
SM_BYTES, BLOCK_BYTES, MOST_BYTES = 228 * 1024, 1024, 227 * 1024


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_blocks_of_a_batch_do_not_crowd_on_a_multiprocessor(variant):
    """As many as are meant to fill the GPU fit, and not one more."""
    taken = variant.shared_bytes(8) + BLOCK_BYTES
    assert variant.blocks_per_sm * taken <= SM_BYTES < (variant.blocks_per_sm + 1) * taken
    assert variant.shared_bytes(8) <= MOST_BYTES


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_lone_token_asks_for_what_its_blocks_use(variant):
    assert variant.shared_bytes(1) == variant.smem_bytes <= variant.shared_bytes(2)


@pytest.mark.parametrize(("num_sms", "splits"), [(132, 128), (78, 64), (31, 31)])
def test_splits_of_latents_are_even_for_blocks_that_merge_groups(num_sms, splits):
    assert num_splits(LATENTS, num_sms) == splits


@pytest.mark.parametrize("tokens", [4, 8, 16, 32])
def test_blocks_of_a_batch_have_the_same_number_of_groups(tokens):
    groups = num_splits(LATENTS, 132) // SPLIT_GROUP
    assert groups % min(groups, num_blocks(LATENTS, tokens, 132)) == 0


@pytest.mark.parametrize(("tokens", "merges"), [(1, False), (3, False), (4, True), (32, True)])
def test_blocks_merge_splits_where_one_may_have_a_group(tokens, merges):
    variant = choose_variant(LATENTS)
    assert variant is not None
    wide = widened(variant, num_splits(LATENTS, 132), num_blocks(LATENTS, tokens, 132))
    assert wide.merges is merges
    assert wide.name == "attention_mla_l512_r64_h24_wide" + "_merging" * merges
