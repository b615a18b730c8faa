"""Slices, dtypes and layouts of loaded shares; every value is traced back to the canonical tensor it came from."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from crosspool.models.directory import read_model_dir
from crosspool.models.families.registry import FAMILIES
from crosspool.models.spec import DenseFFNSpec, MoEFFNSpec
from crosspool.models.tensors import FLOAT32_TENSORS, model_tensors
from crosspool.weights_pool import loader
from crosspool.weights_pool.checkpoint import Checkpoint
from crosspool.weights_pool.loader import iter_pieces, load_attention_weights, load_ffn_weights, plan_load
from crosspool.weights_pool.placement import intermediate_slices
from tests.support.tiny_models import random_tensors, write_tiny_model

SEED = 5


def cut(name: str, value: np.ndarray, start: int, stop: int, slice_index: int) -> np.ndarray:
    """The canonical tensor `value` as a rank with `start:stop` of the intermediate dimension must hold it."""
    if name in ("gate", "up", "shared_gate", "shared_up"):
        return value[start:stop]
    if name in ("down", "shared_down"):
        return value[:, start:stop]
    if name == "expert_down":
        return value[:, :, start:stop]
    if name.startswith("expert_gate_up"):
        half = value.shape[1] // 2
        return np.concatenate((value[:, start:stop], value[:, half + start : half + stop]), axis=1)
    if name == "expert_down_bias" and slice_index > 0:
        return np.zeros_like(value)
    return value


def ffn_width(ffn: DenseFFNSpec | MoEFFNSpec, name: str) -> int:
    if isinstance(ffn, DenseFFNSpec):
        return ffn.intermediate_size
    return ffn.shared.intermediate_size if name.startswith("shared_") and ffn.shared else ffn.expert_intermediate_size


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("num_slices", [1, 2, 3])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_each_rank_holds_exactly_its_slice(tmp_path, family, num_slices, fused):
    path = write_tiny_model(tmp_path, family, seed=SEED, fused=fused, num_shards=2, tokenizer=False)
    directory = read_model_dir(path)
    spec = directory.spec
    canonical = random_tensors(spec, SEED)
    shares = [load_ffn_weights(directory, idx, num_slices) for idx in range(num_slices)]
    names = {(tensor.layer, tensor.name) for tensor in model_tensors(spec) if tensor.pool == "weights"}
    for share in shares:
        assert share.model == {}
        assert {(layer, name) for layer, tensors in enumerate(share.layers) for name in tensors} == names
    for tensor, value in canonical.items():
        if tensor.pool != "weights":
            continue
        parts = intermediate_slices(ffn_width(spec.layers[tensor.layer].ffn, tensor.name), num_slices)
        for idx, (share, part) in enumerate(zip(shares, parts, strict=True)):
            expected = cut(tensor.name, value, part.start, part.stop, idx)
            np.testing.assert_array_equal(share.layers[tensor.layer][tensor.name], expected, err_msg=tensor.name)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_attention_share_holds_no_ffn_weights(tmp_path, family):
    directory = read_model_dir(write_tiny_model(tmp_path, family, seed=SEED, tokenizer=False))
    weights = load_attention_weights(directory)
    canonical = {t: value for t, value in random_tensors(directory.spec, SEED).items() if t.pool == "kv"}
    for tensor, value in canonical.items():
        found = weights.model if tensor.layer is None else weights.layers[tensor.layer]
        np.testing.assert_array_equal(found[tensor.name], value)
    assert weights.num_bytes == sum(value.nbytes for value in canonical.values())


def test_uneven_shares_follow_the_weights_given(tmp_path):
    directory = read_model_dir(write_tiny_model(tmp_path, "qwen3_moe", moe_intermediate_size=96, tokenizer=False))
    widths = [
        load_ffn_weights(directory, idx, 2, shares=[2.0, 1.0]).layers[0]["expert_down"].shape[2] for idx in range(2)
    ]
    assert widths == [64, 32]


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("wanted", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_any_stored_dtype_becomes_any_wanted_one(tmp_path, stored, wanted):
    directory = read_model_dir(write_tiny_model(tmp_path, "glm4_moe_lite", seed=SEED, dtype=stored, tokenizer=False))
    weights = load_ffn_weights(directory, 0, 2, dtype=wanted)
    stored_type = np.dtype(ml_dtypes.bfloat16 if stored == "bfloat16" else stored)
    for tensor, value in random_tensors(directory.spec, SEED).items():
        if tensor.pool == "weights" and tensor.name in ("expert_down", "router", "choice_bias"):
            found = weights.layers[tensor.layer][tensor.name]
            as_held = np.float32 if tensor.name in FLOAT32_TENSORS else wanted
            expected = cut(tensor.name, value, 0, 32, 0).astype(stored_type).astype(as_held)
            assert found.dtype == as_held
            np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))


def test_pieces_are_small_and_cover_every_element_once(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "PIECE_ELEMENTS", 1000)
    directory = read_model_dir(write_tiny_model(tmp_path, "deepseek_v3", seed=SEED, dtype="bfloat16", tokenizer=False))
    with Checkpoint(directory.path) as checkpoint:
        for pool, num_slices in (("kv", 1), ("weights", 3)):
            plan = plan_load(checkpoint, directory, pool, num_slices - 1, num_slices)
            counts = {destination.tensor: np.zeros(destination.shape, np.int8) for destination in plan.destinations}
            num_bytes = 0
            for piece in iter_pieces(checkpoint, plan):
                assert piece.array.dtype == ml_dtypes.bfloat16
                assert piece.tensor.layer is not None or piece.array.size <= 1000
                counts[piece.tensor][piece.index] += 1
                num_bytes += piece.array.nbytes
            assert all((count == 1).all() for count in counts.values())
            assert num_bytes == sum(read.num_bytes for read in loader.reads(checkpoint, plan))


def test_progress_ends_at_the_total(tmp_path):
    directory = read_model_dir(write_tiny_model(tmp_path, "gpt_oss", dtype="float16", tokenizer=False))
    calls: list[tuple[int, int]] = []
    load_ffn_weights(directory, 1, 2, progress=lambda loaded, total: calls.append((loaded, total)))
    loaded = [call[0] for call in calls]
    assert loaded == sorted(loaded)
    assert calls[-1][0] == calls[-1][1] > 0
    assert len({total for _, total in calls}) == 1


def test_both_layouts_and_any_sharding_load_the_same(tmp_path):
    shapes = [{"fused": False}, {"fused": True}, {"fused": False, "num_shards": 7}]
    loaded = [
        load_ffn_weights(read_model_dir(write_tiny_model(tmp_path / str(idx), "mixtral", tokenizer=False, **kw)), 0, 2)
        for idx, kw in enumerate(shapes)
    ]
    for other in loaded[1:]:
        for first, second in zip(loaded[0].layers, other.layers, strict=True):
            assert first.keys() == second.keys()
            for name, value in first.items():
                np.testing.assert_array_equal(value, second[name])


@pytest.mark.parametrize(
    ("slice_index", "num_slices", "message"), [(2, 2, "slice_index is 2"), (0, 4, "at most 3 weights ranks")]
)
def test_a_slice_that_cannot_be_is_refused(tmp_path, slice_index, num_slices, message):
    directory = read_model_dir(write_tiny_model(tmp_path, "qwen3_moe", tokenizer=False))
    with pytest.raises(ValueError, match=message):
        load_ffn_weights(directory, slice_index, num_slices)
