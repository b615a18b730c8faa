"""How much shared memory attention's blocks ask for."""

from __future__ import annotations

import pytest

from crosspool.backends.cuda.kernels.attention_variants import GQA_VARIANTS, MLA_VARIANTS

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
