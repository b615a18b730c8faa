"""A share streamed by several threads is the share that is read piece by piece."""

from __future__ import annotations

import ctypes
import mmap
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
from crosspool.backends.cuda.device.launch import CudaError  # noqa: E402
from crosspool.backends.cuda.loading import registered, share, streaming  # noqa: E402
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


class Pages:
    """Stands where a driver pins pages: notes what is pinned, and fails from the `fails_at`-th on."""

    def __init__(self, fails_at=None):
        self.pinned, self.count, self.fails_at = {}, 0, fails_at

    def register(self, address, num_bytes):
        self.count += 1
        if self.fails_at is not None and self.count > self.fails_at:
            raise CudaError("cuMemHostRegister failed: OUT_OF_MEMORY")
        assert (address % mmap.PAGESIZE, num_bytes % mmap.PAGESIZE) == (0, 0)
        assert not any(other < address + num_bytes and address < other + size for other, size in self.pinned.items())
        self.pinned[address] = num_bytes

    def unregister(self, address):
        del self.pinned[address]

    def files(self, checkpoint, device):
        return registered.RegisteredFiles(registered.Pinning(self.register, self.unregister), lambda: None)


@pytest.fixture
def pages(monkeypatch):
    """Files are read where they are mapped, a region being one page."""
    found = Pages()
    monkeypatch.setattr(registered, "REGION_BYTES", mmap.PAGESIZE)
    monkeypatch.setattr(streaming, "_registered", found.files)
    return found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_share_read_in_its_files_pages_is_the_one_read_in_turn(tmp_path, monkeypatch, pages, family, fused, dtype):
    path = write_tiny_model(tmp_path, family, seed=5, dtype=dtype, fused=fused, num_shards=3, tokenizer=False)
    directory = read_model_dir(path)
    copied = []

    def copier(device, stream):
        def copy(to, source, num_bytes):
            pinned = [size - (source - begin) for begin, size in pages.pinned.items() if 0 <= source - begin < size]
            assert [size >= num_bytes for size in pinned] == [True], "a copy lies in one pinned piece"
            copied.append(num_bytes)
            ctypes.memmove(to, source, num_bytes)

        return copy

    monkeypatch.setattr(streaming, "_copier", copier)
    expected = load_ffn_weights(directory, 0, 1, ml_dtypes.bfloat16)
    told = Told()
    _, layers = stream_share(directory, "weights", CPU, told, extent_bytes=60_000)
    for found, layer in zip(layers, expected.layers, strict=True):
        same(found, layer)
    assert told.loaded[-1] == told.total > 0
    model, layers = stream_share(directory, "kv", CPU, ignore, extent_bytes=60_000)
    expected = load_attention_weights(directory, ml_dtypes.bfloat16)
    same(model, expected.model)
    for found, layer in zip(layers, expected.layers, strict=True):
        same(found, layer)
    assert max(copied) <= mmap.PAGESIZE
    until(lambda: not pages.pinned)


def test_where_pages_cannot_be_pinned_after_all_processes_read_the_share(tmp_path, pages, caplog):
    directory = read_model_dir(write_tiny_model(tmp_path, "qwen3_moe", seed=5, num_shards=3, tokenizer=False))
    pages.fails_at = 3
    expected = load_ffn_weights(directory, 0, 1, ml_dtypes.bfloat16)
    _, layers = stream_share(directory, "weights", CPU, ignore, num_readers=1, extent_bytes=60_000)
    for found, layer in zip(layers, expected.layers, strict=True):
        same(found, layer)
    assert pages.count > 3
    assert "OUT_OF_MEMORY" in caplog.text
    until(lambda: not pages.pinned)


@pytest.mark.parametrize(("seconds", "is_taken"), [(0.0, True), (0.02, False)])
def test_files_are_read_by_processes_where_pinning_is_slow(tmp_path, monkeypatch, seconds, is_taken):
    file = tmp_path / "file"
    file.write_bytes(bytes(6 * mmap.PAGESIZE))
    monkeypatch.setattr(registered, "REGION_BYTES", mmap.PAGESIZE)
    monkeypatch.setattr(registered, "MIN_GB_PER_S", 4 * mmap.PAGESIZE / 1e9 / 0.04)
    pages = Pages()

    def register(address, num_bytes):
        time.sleep(seconds)
        pages.register(address, num_bytes)

    pinning = registered.Pinning(register, pages.unregister)
    found = registered.register_files([file], pinning, lambda: None)
    assert (found is not None) == is_taken
    assert registered.register_files([file], None, lambda: None) is None
    pages.fails_at = pages.count
    assert registered.register_files([file], pinning, lambda: None) is None
    if found is not None:
        assert len(pages.pinned) == registered.TRIED_REGIONS
        found.close()
    until(lambda: not pages.pinned)


def until(is_so):
    for _ in range(500):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError("not within five seconds")


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
