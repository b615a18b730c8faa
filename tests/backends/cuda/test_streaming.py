"""A share streamed by several threads is the share that is read piece by piece."""

from __future__ import annotations

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from crosspool.errors import CheckpointError
from crosspool.models.directory import read_model_dir
from crosspool.models.families.registry import FAMILIES
from crosspool.weights_pool import extents
from crosspool.weights_pool.loader import load_attention_weights, load_ffn_weights
from tests.support.tiny_models import write_tiny_model

torch = pytest.importorskip("torch")
from crosspool.backends.cuda.loading import share, streaming  # noqa: E402
from crosspool.backends.cuda.loading.streaming import ahead, stream_share  # noqa: E402

pytestmark = pytest.mark.judge
CPU = torch.device("cpu")


def ignore(loaded, total):
    pass


class Told:
    """A progress callback that remembers."""

    def __init__(self):
        self.loaded, self.total = [], 0

    def __call__(self, loaded, total):
        self.loaded.append(loaded)
        self.total = total


def same(found, expected):
    assert set(found) == set(expected)
    for name, array in expected.items():
        wide = np.asarray(array, np.float32)
        np.testing.assert_array_equal(found[name].float().numpy(), wide, err_msg=name)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("num_slices", [1, 2])
@pytest.mark.parametrize(("dtype", "max_bytes"), [("float32", 60_000), ("bfloat16", 60_000), ("bfloat16", 2048)])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_streamed_share_is_the_one_read_in_turn(tmp_path, family, num_slices, fused, dtype, max_bytes):
    path = write_tiny_model(tmp_path, family, seed=5, dtype=dtype, fused=fused, num_shards=3, tokenizer=False)
    directory = read_model_dir(path)
    for index in range(num_slices):
        expected = load_ffn_weights(directory, index, num_slices, ml_dtypes.bfloat16)
        told = Told()
        model, layers = stream_share(
            directory, "weights", CPU, told, index, num_slices, num_readers=1, extent_bytes=max_bytes
        )
        assert model == {}
        for found, layer in zip(layers, expected.layers, strict=True):
            same(found, layer)
        assert told.loaded == sorted(told.loaded)
        assert told.loaded[-1] == told.total
    expected = load_attention_weights(directory, ml_dtypes.bfloat16)
    model, layers = stream_share(directory, "kv", CPU, ignore, num_readers=1, extent_bytes=max_bytes)
    same(model, expected.model)
    for found, layer in zip(layers, expected.layers, strict=True):
        same(found, layer)


def test_a_load_that_is_given_up_or_meets_an_error_ends(tmp_path, monkeypatch):
    directory = read_model_dir(write_tiny_model(tmp_path, "qwen3_moe", seed=5, num_shards=3, tokenizer=False))

    def cancel(loaded, total):
        raise InterruptedError("given up")

    with pytest.raises(InterruptedError):
        stream_share(directory, "weights", CPU, cancel, num_readers=2, extent_bytes=2048)

    def copier(device, stream):
        def copy(to, source, num_bytes):
            raise RuntimeError("a copy failed")

        return copy

    with monkeypatch.context() as patched:
        patched.setattr(streaming, "_copier", copier)
        with pytest.raises(RuntimeError, match="a copy failed"):
            stream_share(directory, "weights", CPU, ignore, num_readers=2, extent_bytes=2048)

    whole = extents.extents

    def late(parts, max_bytes):
        found = whole(parts, max_bytes)
        with found[-1].file.open("r+b") as file:
            file.truncate(found[-1].start + 1)
        return found

    monkeypatch.setattr(share, "extents", late)
    with pytest.raises(CheckpointError, match="ends at byte"):
        stream_share(directory, "weights", CPU, ignore, num_readers=2, extent_bytes=2048)


def test_the_first_layer_is_on_its_way_while_the_others_are_planned(tmp_path, monkeypatch):
    directory = read_model_dir(write_tiny_model(tmp_path, "qwen3_moe", seed=5, dtype="bfloat16", tokenizer=False))
    whole, is_copied, num_planned = extents.extents, [], 0

    def planned(parts, max_bytes):
        nonlocal num_planned
        num_planned += 1
        assert num_planned < directory.spec.num_layers or is_copied, "nothing was copied before the plan was whole"
        return whole(parts, max_bytes)

    def copier(device, stream):
        def copy(to, source, num_bytes):
            ctypes.memmove(to, source, num_bytes)
            is_copied.append(num_bytes)

        return copy

    monkeypatch.setattr(share, "extents", planned)
    monkeypatch.setattr(streaming, "_copier", copier)
    stream_share(directory, "weights", CPU, ignore, num_readers=1, extent_bytes=2048)
    assert num_planned == directory.spec.num_layers > 1


def test_shares_that_load_at_once_stream_one_after_another(tmp_path, monkeypatch):
    directory = read_model_dir(write_tiny_model(tmp_path, "qwen3_moe", seed=5, dtype="bfloat16", tokenizer=False))
    whole, planned, copied = extents.extents, [], []
    both_are_planned = threading.Event()

    def plan(parts, max_bytes):
        planned.append(threading.get_ident())
        if len(set(planned)) == 2:
            both_are_planned.set()
        return whole(parts, max_bytes)

    def copier(device, stream):
        load = threading.get_ident()

        def copy(to, source, num_bytes):
            if not copied:
                assert both_are_planned.wait(10), "the second waits with its first layer planned"
                time.sleep(0.1)  # it would copy now
            copied.append(load)
            ctypes.memmove(to, source, num_bytes)

        return copy

    monkeypatch.setattr(share, "extents", plan)
    monkeypatch.setattr(streaming, "_copier", copier)
    with ThreadPoolExecutor(2) as threads:
        loads = [threads.submit(stream_share, directory, "weights", CPU, ignore, num_readers=1) for _ in range(2)]
        assert [load.exception() for load in loads] == [None, None]
    first, second = dict.fromkeys(copied)
    assert copied == [first] * copied.count(first) + [second] * copied.count(second)


def test_a_load_is_given_up_while_another_one_streams(tmp_path):
    directory = read_model_dir(write_tiny_model(tmp_path, "qwen3_moe", seed=5, tokenizer=False))

    def cancel(loaded, total):
        assert (loaded, total > 0) == (0, True)
        raise InterruptedError("given up")

    with streaming.STREAMING, pytest.raises(InterruptedError):
        stream_share(directory, "weights", CPU, cancel, num_readers=1)


def test_a_plan_is_made_bit_by_bit_while_the_one_before_goes_out():
    made = []

    def plans():
        for layer in range(3):
            for part in range(4):
                made.append((layer, part))
                yield None
            yield [f"{layer}.{number}" for number in range(4)]

    gone = ahead(plans())
    assert [next(gone), len(made)] == ["0.0", 5], "one bit of the second layer"
    assert [next(gone), len(made)] == ["0.1", 6]
    assert list(gone) == ["0.2", "0.3", *(f"{layer}.{number}" for layer in (1, 2) for number in range(4))]
