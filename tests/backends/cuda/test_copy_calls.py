"""Copies and pinned memory as the driver is asked for them: each argument in its place. No GPU needed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.device import uploads  # noqa: E402
from crosspool.backends.cuda.device.driver import CudaError, Driver  # noqa: E402
from crosspool.backends.cuda.kv_frames import copy_engine  # noqa: E402
from crosspool.backends.cuda.kv_frames.copy_engine import DeviceCopyEngine  # noqa: E402
from crosspool.backends.cuda.loading.moving import pin  # noqa: E402
from crosspool.backends.cuda.loading.streaming import _copier  # noqa: E402
from crosspool.backends.cuda.prefill_rank.swap import copy_in  # noqa: E402
from crosspool.weights_pool.readers import Readers  # noqa: E402
from tests.backends.cuda.fake_driver import put_in_place  # noqa: E402

pytestmark = pytest.mark.judge

GPU = torch.device("cuda", 1)
STREAM = SimpleNamespace(cuda_stream=99)


@pytest.fixture
def asked(monkeypatch):
    """Calls in their order."""
    found = []

    def note(name):
        return lambda *arguments: (found.append((name, *arguments)), ())[1]

    names = ("cuMemcpyHtoDAsync", "cuMemHostRegister", "cuMemHostUnregister")
    put_in_place(monkeypatch, {name: note(name) for name in names})
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.append(("set_device", device)))
    return found


def test_copies_to_a_gpu_name_their_target_first(asked):
    _copier(GPU, STREAM)(1 << 40, 1 << 41, 4096)
    to, source = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    copy_in(to, source, 16, 48, STREAM)
    assert asked == [
        ("cuMemcpyHtoDAsync", 1 << 40, 1 << 41, 4096, 99),
        ("cuMemcpyHtoDAsync", to.data_ptr() + 16, source.data_ptr() + 16, 32, 99),
    ]


def test_readers_memory_is_there_before_it_is_pinned_and_let_go_with_the_block(asked, monkeypatch):
    with Readers(2, 8192) as readers, ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(readers, "touch", lambda: asked.append(("touch",)))
        with pin(readers, GPU, threads) as pinned:
            at = pinned.result().data_ptr()
            expected = [("touch",), ("set_device", GPU), ("cuMemHostRegister", at, 4 * 8192, 0)]
            assert asked == expected
    assert asked == [*expected, ("cuMemHostUnregister", at)]


def test_memory_that_could_not_be_had_is_not_let_go(asked, monkeypatch):
    """The thread that pins it finds out; the load has its error."""
    with Readers(1, 8192) as readers, ThreadPoolExecutor(1) as threads:
        readers._processes[0].kill()
        readers._processes[0].wait()
        with pin(readers, GPU, threads) as pinned, pytest.raises(Exception, match="ended with -9; load again"):
            pinned.result()
    assert asked == []


BATCHES = """
unsigned long seen[10];
int cuMemcpyBatchAsync%s(unsigned long *to, unsigned long *from, unsigned long *sizes, unsigned long count,
                         int *attributes, unsigned long *firsts, unsigned long num_attributes, %s void *stream) {
  seen[0] = count, seen[1] = to[count - 1], seen[2] = from[count - 1], seen[3] = sizes[count - 1];
  seen[4] = attributes[0], seen[5] = attributes[5], seen[6] = firsts[0], seen[7] = num_attributes;
  seen[8] = (unsigned long)stream;
  return seen[9];
}
"""
SINGLE = """
unsigned long seen[10];
int cuMemcpyAsync(unsigned long to, unsigned long from, unsigned long size, void *stream) {
  seen[0]++, seen[1] = to, seen[2] = from, seen[3] = size, seen[8] = (unsigned long)stream;
  return seen[9];
}
"""
"""By the layout that cuda.h gives them; seen[9]: what they return."""


@pytest.mark.parametrize(
    ("source", "marks"),
    [
        (BATCHES % ("_v2", ""), [1, 1, 0, 1]),
        (BATCHES % ("", "unsigned long *failed,"), [1, 1, 0, 1]),
        (SINGLE, [0] * 4),
    ],
)
def test_the_library_gets_a_batch_of_copies_in_its_places(tmp_path, monkeypatch, source, marks):
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    (tmp_path / "driver.c").write_text(source)
    library = tmp_path / "driver.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    loaded = ctypes.CDLL(str(library))
    seen = (ctypes.c_ulong * 10).in_dll(loaded, "seen")
    monkeypatch.setattr(copy_engine, "own_stream", lambda device: SimpleNamespace(cuda_stream=1 << 42))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: loaded)
    engine = DeviceCopyEngine(Driver("kv0"), GPU)
    targets, sources, sizes = (np.arange(2, dtype=np.uint64) + at for at in (1 << 40, 1 << 41, 4096))
    engine._enqueue(targets, sources, sizes)
    assert list(seen[:9]) == [2, (1 << 40) + 1, (1 << 41) + 1, 4097, *marks, 1 << 42]
    seen[9] = 700
    with pytest.raises(CudaError, match=r"kv0: cuMemcpy\w*Async failed: error 700"):
        engine._enqueue(targets, sources, sizes)


def test_blocks_of_every_size_from_one_number_up_are_pinned_ahead(monkeypatch):
    """torch rounds what a step asks for up to a power of two, whose blocks it keeps apart from others."""
    asked = []
    monkeypatch.setattr(uploads.torch, "empty", lambda size, **_: asked.append(size))
    uploads.pin_ahead()
    one_number = torch.int32.itemsize
    assert sorted(set(asked)) == [one_number << power for power in range(23)]
