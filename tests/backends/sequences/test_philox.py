"""The generator against the published known answers, and the properties a replayed step relies on."""

import numpy as np
import pytest

from crosspool.backends.sequences.philox import BLOCK, UniformStream, philox4x32, uniforms

ONES = 0xFFFFFFFF
PI = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (*PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers_of_random123(counter, key, words):
    answer = philox4x32(np.array([counter, counter], dtype=np.uint64), key)
    assert answer.dtype == np.uint32
    assert answer.tolist() == [list(words)] * 2


def test_key_is_the_seed_low_word_first_and_counter_the_position():
    seed, position = 0x0123456789ABCDEF, 7 + (3 << 32)
    (word, *_), *_ = philox4x32(np.array([[7, 3, 0, 0]], dtype=np.uint64), (0x89ABCDEF, 0x01234567))
    assert uniforms(seed, position, 1)[0] == (int(word) + 0.5) * 2.0**-32


def test_a_stream_gives_the_number_of_its_position_in_any_order():
    expected = uniforms(99, 0, 3 * BLOCK)
    stream = UniformStream(99)
    for position in (0, 1, BLOCK, BLOCK - 1, 3 * BLOCK - 1, 5, 5):
        assert stream.at(position) == expected[position]


def test_numbers_lie_strictly_inside_zero_and_one_and_are_spread_evenly():
    numbers = np.concatenate([uniforms(seed, 0, 4096) for seed in range(16)])
    assert numbers.min() > 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=16, range=(0, 1))[0]
    assert np.abs(counts / len(numbers) - 1 / 16).max() < 0.004  # 4 standard deviations


def test_any_integer_is_a_seed():
    assert uniforms(-1, 0, 1) == uniforms(2**64 - 1, 0, 1)
    assert uniforms(2**65 + 3, 0, 1) == uniforms(3, 0, 1)
