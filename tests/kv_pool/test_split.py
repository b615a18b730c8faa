"""How a model's KV lies over several KV ranks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosspool.kv_pool.split import (
    cached_spec,
    choose_kv_split,
    exchange_width,
    head_bounds,
    share_of_heads,
    spread_pages,
)
from crosspool.models.families.registry import spec_from_config
from tests.support.tiny_models import tiny_config


def spec(family, **overrides):
    return spec_from_config(tiny_config(family, **overrides))


@pytest.mark.parametrize(
    ("family", "kv_heads", "num_ranks", "split"),
    [
        ("qwen3_moe", 2, 1, "one"),
        ("qwen3_moe", 2, 2, "heads"),
        ("qwen3_moe", 4, 3, "tokens"),  # 2, 1 and 1 heads would leave cache unused
        ("qwen3_moe", 1, 2, "tokens"),
        ("deepseek_v2", 4, 2, "tokens"),
        ("glm4_moe_lite", 4, 2, "tokens"),
        ("olmoe", 4, 2, "tokens"),  # its norm spans all heads
        ("gpt_oss", 2, 2, "heads"),
    ],
)
def test_auto_cuts_heads_where_they_divide(family, kv_heads, num_ranks, split):
    assert choose_kv_split(spec(family, num_key_value_heads=kv_heads), num_ranks, "auto", "m") == split


@pytest.mark.parametrize(
    ("family", "num_ranks", "why"),
    [
        ("deepseek_v2", 2, "whose latent cache has no heads"),
        ("qwen3_moe", 3, "which has 2 KV heads for 3 KV ranks"),
        ("olmoe", 2, "whose norm of queries and keys spans all heads"),
    ],
)
def test_heads_that_cannot_be_cut_are_refused_with_the_remedy(family, num_ranks, why):
    with pytest.raises(ValueError, match=f"kv_split is heads for m, {why}; use kv_split tokens or auto"):
        choose_kv_split(spec(family), num_ranks, "heads", "m")


def test_what_is_asked_for_is_given():
    assert choose_kv_split(spec("qwen3_moe", num_key_value_heads=4), 3, "heads", "m") == "heads"
    assert choose_kv_split(spec("qwen3_moe"), 2, "tokens", "m") == "tokens"
    assert choose_kv_split(spec("qwen3_moe"), 2, "one", "m") == "one"
    assert choose_kv_split(spec("qwen3_moe"), 1, "tokens", "m") == "one"


@given(num_heads=st.integers(1, 64), num_ranks=st.integers(1, 8))
def test_every_head_has_one_rank_and_the_first_ranks_have_most(num_heads, num_ranks):
    bounds = head_bounds(num_heads, num_ranks)
    assert [head for own in bounds for head in range(num_heads)[own]] == list(range(num_heads))
    widths = [own.stop - own.start for own in bounds]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] - widths[-1] <= 1


def test_shares_of_heads_have_the_whole_models_heads_between_them():
    whole = spec("qwen2_moe", num_key_value_heads=4, num_attention_heads=8)
    shares = [share_of_heads(whole, idx, 3) for idx in range(3)]
    assert [share.layers[0].attention.num_kv_heads for share in shares] == [2, 1, 1]
    assert [share.layers[0].attention.num_heads for share in shares] == [4, 2, 2]
    assert replace(shares[0], layers=whole.layers) == whole
    assert cached_spec(whole, "heads", 3) == shares[0]
    assert cached_spec(whole, "tokens", 3) == whole


def test_what_crosses_between_kv_ranks():
    gqa, mla = spec("qwen3_moe"), spec("deepseek_v2")
    assert exchange_width(gqa, "one") == 0
    assert exchange_width(gqa, "heads") == gqa.hidden_size
    assert exchange_width(gqa, "tokens") == 4 * 32 + 2 * 2 * 32  # queries and a cache row; back: 4 heads of 32 + 1
    assert exchange_width(mla, "tokens") == 4 * (32 + 16) + (32 + 16)


@given(
    width=st.integers(1, 5),
    room=st.lists(st.integers(-10, 60), min_size=1, max_size=5),
    num_pages=st.integers(0, 80),
)
def test_pages_go_to_the_rank_with_most_room_and_fill_all_of_it(width, room, num_pages):
    owners = spread_pages(num_pages, width, room)
    fitting = sum(max(0, frames) // width for frames in room)
    assert (owners is None) == (num_pages > fitting)
    if owners is None:
        return
    left = list(room)
    for owner in owners:
        assert left[owner] == max(left)
        left[owner] -= width
        assert left[owner] >= 0


def test_equal_ranks_take_pages_in_turns():
    assert spread_pages(5, 2, [10, 10]) == (0, 1, 0, 1, 0)
    assert spread_pages(4, 1, [1, 4]) == (1, 1, 1, 0)
