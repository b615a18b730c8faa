"""The arena's views: what is written is read, nothing else is touched, and one page equals many."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosspool.backends.numpy.kv_cache import new_arena
from crosspool.models.spec import GQASpec, MLASpec, RopeSpec
from tests.support.paging import Pages, caches_for, geometry_for, poisoned_arena, step_slots

ROPE = RopeSpec(theta=1e4, dim=4)
GQA = GQASpec(num_heads=4, num_kv_heads=2, head_dim=6, rope=ROPE, softmax_scale=1.0)
MLA = MLASpec(
    num_heads=3,
    q_lora_rank=None,
    kv_lora_rank=7,
    qk_nope_head_dim=5,
    qk_rope_head_dim=4,
    v_head_dim=3,
    rope=ROPE,
    softmax_scale=1.0,
)
NUM_FRAMES = 200


@pytest.mark.fuzz
@given(
    seed=st.integers(0, 2**32),
    attention=st.sampled_from([GQA, MLA]),
    page_tokens=st.sampled_from([1, 3, 16, 64]),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
)
def test_what_is_written_is_read_and_the_rest_stays(seed, attention, page_tokens, lengths):
    rng = np.random.default_rng(seed)
    geometry = geometry_for(attention, 3, page_tokens)
    arena = poisoned_arena(max(NUM_FRAMES, 300), geometry.frame_bytes)
    pages = Pages(geometry, len(arena), seed)
    tables = [pages.table(length) for length in lengths]
    slots = step_slots(tables, [0] * len(lengths), lengths, page_tokens)
    width = attention.kv_elements_per_token
    written = rng.standard_normal((3, sum(lengths), width)).astype(np.float32)
    caches = caches_for(attention, geometry, arena)
    for layer, cache in enumerate(caches):
        cache.write(written[layer], slots)
    for layer, cache in enumerate(caches):
        for row in slots.rows:
            rows = written[layer, row.start : row.stop]
            assert (cache.read_rows(row) == rows).all()
            begin = int(rng.integers(0, len(rows)))
            end = int(rng.integers(begin + 1, len(rows) + 1))
            keys, values = cache.read(row, begin, end)
            part = rows[begin:end]
            if attention is GQA:
                by_head = part.reshape(len(part), 2, 2, 6)
                assert (keys == by_head[:, 0].transpose(1, 2, 0)).all()
                assert (values == by_head[:, 1].transpose(1, 0, 2)).all()
            else:
                assert (keys == part.T[None]).all()
                assert (values == part[None, :, :7]).all()
    num_written = np.count_nonzero(~np.isnan(arena[:, : arena.shape[1] // 4 * 4].view(np.float32)))
    assert num_written == written.size
    assert (arena[0] == 0xFF).all()


def test_an_arena_without_room_for_a_page_is_refused():
    with pytest.raises(ValueError, match="1 frames of 4096 bytes"):
        new_arena(1, 4096)
    with pytest.raises(ValueError, match="multiple of 4"):
        new_arena(8, 4095)
