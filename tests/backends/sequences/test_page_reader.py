"""What frame numbers mean on one of several KV ranks."""

import pytest

from crosspool.backends.sequences.page_reader import PageReader


def test_with_one_rank_entries_are_the_frames():
    reader = PageReader(model="m", frames_per_page=2)
    assert reader.empty().shape == (2, 0)
    assert reader.entries([(3, 9), (700, 1)], 5).tolist() == [[3, 700], [9, 1]]


def test_frames_of_the_second_rank_are_counted_from_its_first():
    reader = PageReader(model="m", frames_per_page=2, first_frame=10, num_frames=10)
    assert reader.entries([(11, 19)], 5).tolist() == [[1], [9]]


def test_each_rank_takes_its_part_of_a_page():
    parts = [
        PageReader(model="m", frames_per_page=1, first_frame=10 * n, num_frames=10, part=1 - n, num_parts=2)
        for n in (0, 1)
    ]
    assert [reader.entries([(13, 4)], 5).tolist() for reader in parts] == [[[4]], [[3]]]


def test_pages_of_other_ranks_are_known_by_their_rank_alone():
    reader = PageReader(model="m", frames_per_page=2, first_frame=10, num_frames=10, is_spread=True)
    assert reader.empty().shape == (3, 0)
    assert reader.entries([(11, 12), (4, 5), (29, 21)], 5).tolist() == [[1, 0, 0], [2, 0, 0], [1, 0, 2]]


@pytest.mark.parametrize(
    ("fields", "page"),
    [
        ({}, (3,)),
        ({}, (0, 3)),
        ({"first_frame": 10, "num_frames": 10}, (3, 4)),  # another rank's
        ({"first_frame": 10, "num_frames": 10}, (10, 11)),  # the reserved frame
        ({"first_frame": 10, "num_frames": 10, "is_spread": True}, (9, 11)),  # on two ranks
        ({"first_frame": 10, "num_frames": 10, "is_spread": True}, (20, 21)),
        ({"num_frames": 10, "num_parts": 2}, (1, 2, 13)),
        ({"num_frames": 10, "num_parts": 2, "part": 0}, (11, 12, 1, 2)),
    ],
)
def test_pages_that_cannot_be_are_refused(fields, page):
    with pytest.raises(ValueError, match="of sequence 5: a page of m is 2 frames"):
        PageReader(model="m", frames_per_page=2, **fields).entries([page], 5)
