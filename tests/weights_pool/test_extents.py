"""Extents hold every read of a share, and the bytes that they name are the regions that `Checkpoint.read` gives."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from crosspool.models.directory import read_model_dir
from crosspool.weights_pool.checkpoint import ITEM_BYTES, STORED_DTYPES, Checkpoint
from crosspool.weights_pool.extents import GAP_BYTES, ExtentReader, extents, joined, part_of, shortened
from crosspool.weights_pool.loader import payload_bytes, plan_load, reads
from tests.support.tiny_models import write_tiny_model


def parts_of(checkpoint, wanted):
    return [part_of(checkpoint, read) for read in wanted]


def check_place(part, expected):
    """`at` is given exactly where the region's elements are one run in the file and in the destination."""
    destination, region = part.read.destination, part.read.region
    numbers = np.arange(np.prod(destination.shape)).reshape(destination.shape)[region.index].ravel()
    is_run = numbers[-1] - numbers[0] + 1 == len(numbers)
    is_plain = not region.pick and not region.transpose and expected.nbytes == part.stop - part.start
    assert part.at == (numbers[0] if is_run and is_plain else None)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("num_slices", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v2"])
@pytest.mark.parametrize("max_bytes", [600, 1 << 24])
def test_the_bytes_of_every_part_are_its_region(tmp_path, family, num_slices, fused, max_bytes):
    directory = read_model_dir(write_tiny_model(tmp_path, family, seed=3, fused=fused, num_shards=2, tokenizer=False))
    with Checkpoint(directory.path) as checkpoint:
        wanted = list(reads(checkpoint, plan_load(checkpoint, directory, "weights", num_slices - 1, num_slices)))
        found = extents(parts_of(checkpoint, wanted), max_bytes)
        assert sorted(map(id, wanted)) == sorted(id(part.read) for extent in found for part in extent.parts)
        for extent in found:
            assert extent.num_bytes <= max_bytes or len(extent.parts) == 1
            data = np.zeros(extent.num_bytes + 3, np.uint8)
            with ExtentReader() as reader:
                reader.read(extent, memoryview(data))
            assert not data[extent.num_bytes :].any()
            for part in extent.parts:
                values = data[part.start - extent.start : part.stop - extent.start].view(STORED_DTYPES[part.dtype])
                strides = tuple(stride * values.itemsize for stride in part.strides)
                region = np.lib.stride_tricks.as_strided(values, part.shape, strides)
                expected = checkpoint.read(part.read.source, part.read.region.read)
                np.testing.assert_array_equal(region, expected)
                check_place(part, expected)


def test_side_by_side_reads_are_one_extent_and_far_ones_are_not(tmp_path):
    directory = read_model_dir(write_tiny_model(tmp_path, "qwen3_moe", seed=3, tokenizer=False))
    with Checkpoint(directory.path) as checkpoint:
        wanted = list(reads(checkpoint, plan_load(checkpoint, directory, "weights")))
        found = extents(parts_of(checkpoint, wanted))
        assert len(found) < len(wanted) / 4
        for before, after in pairwise(found):
            assert before.file != after.file or after.start - before.stop > GAP_BYTES


def test_neighbours_in_file_and_destination_are_joined_and_keep_every_byte(tmp_path):
    directory = read_model_dir(write_tiny_model(tmp_path, "qwen3_moe", seed=3, tokenizer=False))
    with Checkpoint(directory.path) as checkpoint:
        wanted = list(reads(checkpoint, plan_load(checkpoint, directory, "weights")))
        (extent, *_) = extents(parts_of(checkpoint, wanted))
    parts = joined(extent, lambda part: True).parts
    assert len(parts) < len(extent.parts), "gate and up of an expert lie side by side in both"
    assert joined(extent, lambda part: False) == extent

    def bytes_of(given):
        places = {}
        for part in given:
            item = ITEM_BYTES[part.dtype]
            first = id(part.read.destination), part.at
            places.update({(first[0], first[1] * item + n): part.start + n for n in range(part.stop - part.start)})
        return places

    assert bytes_of(parts) == bytes_of(extent.parts)


@pytest.mark.parametrize("num_slices", [1, 2])
@pytest.mark.parametrize("max_bytes", [7, 600])
def test_a_shortened_extent_names_the_same_bytes_and_elements(tmp_path, num_slices, max_bytes):
    directory = read_model_dir(write_tiny_model(tmp_path, "deepseek_v2", seed=3, tokenizer=False))
    with Checkpoint(directory.path) as checkpoint:
        plan = plan_load(checkpoint, directory, "weights", 0, num_slices)
        wanted = list(reads(checkpoint, plan))
        assert payload_bytes(checkpoint, plan) == sum(read.num_bytes for read in wanted)
        num_cut = 0
        for extent in extents(parts_of(checkpoint, wanted), max_bytes):
            pieces = list(shortened(extent, lambda part: True, max_bytes))
            if len(extent.parts) > 1 or extent.parts[0].at is None or extent.num_bytes <= max_bytes:
                assert pieces == [extent]
                continue
            num_cut += 1
            place, at, item_bytes = extent.start, extent.parts[0].at, ITEM_BYTES[extent.parts[0].dtype]
            for piece in pieces:
                (part,) = piece.parts
                assert (piece.start, part.start, part.stop, part.at) == (place, place, piece.stop, at)
                assert 0 < piece.num_bytes <= max(max_bytes, item_bytes)
                assert piece.payload_bytes == piece.num_bytes
                place, at = piece.stop, at + piece.num_bytes // item_bytes
            assert place == extent.stop
            assert list(shortened(extent, lambda part: False, max_bytes)) == [extent]
        assert num_cut
