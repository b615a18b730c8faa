from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosspool.weights_pool.placement import SLICE_MULTIPLE, intermediate_slices


def widths(*args, **kwargs):
    return [part.width for part in intermediate_slices(*args, **kwargs)]


def test_1408_over_three_ranks():
    assert widths(1408, 3) == [480, 464, 464]


def test_even_division_is_even():
    assert widths(768, 4) == [192] * 4
    assert widths(1536, 1) == [1536]


def test_a_share_half_as_large_gets_half_the_width():
    assert widths(1536, 3, [1, 1, 0.5]) == [624, 608, 304]  # 614.4, 614.4 and 307.2 before rounding to 16


def test_the_last_slice_takes_the_odd_rest():
    assert widths(40, 2) == [32, 8]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((32, 3), "at most 2 weights ranks"),
        ((64, 0), "0 weights ranks"),
        ((64, 2, [1.0]), "1 shares for 2"),
        ((64, 2, [1.0, 0.0]), "positive"),
    ],
)
def test_what_cannot_be_cut_is_refused(args, message):
    with pytest.raises(ValueError, match=message):
        intermediate_slices(*args)


@given(
    width=st.integers(16, 20000),
    shares=st.lists(st.floats(0.05, 20.0), min_size=1, max_size=9),
)
def test_slices_cover_the_width_in_multiples(width, shares):
    num_units = -(-width // SLICE_MULTIPLE)
    if num_units < len(shares):
        return
    slices = intermediate_slices(width, len(shares), shares)
    assert slices[0].start == 0
    assert slices[-1].stop == width
    for left, right in pairwise(slices):
        assert left.stop == right.start
        assert left.width % SLICE_MULTIPLE == 0
    assert all(part.width > 0 for part in slices)


@given(width=st.integers(1, 2000), num_slices=st.integers(1, 16))
def test_equal_shares_differ_by_one_unit_at_most(width, num_slices):
    width *= SLICE_MULTIPLE
    if width // SLICE_MULTIPLE < num_slices:
        return
    found = widths(width, num_slices)
    assert max(found) - min(found) <= SLICE_MULTIPLE
    assert found == sorted(found, reverse=True)
