"""Parts that follow from another expert's are those that working out every read gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crosspool.models.directory import read_model_dir
from crosspool.weights_pool.checkpoint import Checkpoint
from crosspool.weights_pool.extents import part_of
from crosspool.weights_pool.loader import plan_load, reads
from crosspool.weights_pool.parts import parts
from tests.support.tiny_models import write_tiny_model

MAX_ELEMENTS = 1 << 20


def without_read(part):
    """Where a part is, where it goes, and what its shape is."""
    tensor = part.read.destination.tensor
    return tensor, replace(part, read=None), part.read.num_bytes


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("num_slices", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v2"])
@pytest.mark.parametrize("max_elements", [700, MAX_ELEMENTS])
def test_parts_are_those_of_every_read(tmp_path, family, num_slices, fused, max_elements):
    directory = read_model_dir(write_tiny_model(tmp_path, family, seed=3, fused=fused, num_shards=2, tokenizer=False))
    with Checkpoint(directory.path) as checkpoint:
        plan = plan_load(checkpoint, directory, "weights", num_slices - 1, num_slices)
        expected = [part_of(checkpoint, read) for read in reads(checkpoint, plan, max_elements)]
        for is_plain in (True, False):
            found = list(parts(checkpoint, plan, max_elements, lambda part, is_plain=is_plain: is_plain))
            assert list(map(without_read, found)) == list(map(without_read, expected))
        assert found == expected, "parts that are not plain keep their own reads"


def test_experts_in_runs_share_the_first_ones_read(tmp_path):
    directory = read_model_dir(write_tiny_model(tmp_path, "qwen3_moe", seed=3, tokenizer=False))
    with Checkpoint(directory.path) as checkpoint:
        plan = plan_load(checkpoint, directory, "weights")
        found = list(parts(checkpoint, plan, MAX_ELEMENTS, lambda part: True))
    gate_up = [part for part in found if part.read.tensor.name == "expert_gate_up" and part.read.tensor.layer == 0]
    assert len(gate_up) > 4
    assert len({id(part.read) for part in gate_up}) == 2, "one for gates, one for ups"
