"""Launches as the driver's library sees them, and a Triton function's compiled forms among them. No GPU needed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.device import jit_kernel, kernel_launch  # noqa: E402
from crosspool.backends.cuda.device.jit_kernel import JitKernel  # noqa: E402
from crosspool.backends.cuda.device.kernel_launch import COOPERATIVE, OVERLAPPING, launch_kernel  # noqa: E402
from crosspool.backends.cuda.device.launch import DeviceKernels  # noqa: E402
from tests.backends.cuda.fake_driver import put_in_place  # noqa: E402

pytestmark = pytest.mark.judge

DRIVER = """
typedef struct { int id; char pad[4]; union { char pad[64]; int number; } value; } Attribute;
typedef struct {
  unsigned grid[3], block[3], smem; void *stream; Attribute *attributes; unsigned num_attributes;
} Config;
long seen[12];
int cuLaunchKernelEx(const Config *config, void *function, void **params, void **extra) {
  for (int i = 0; i < 3; i++) seen[i] = config->grid[i], seen[3 + i] = config->block[i];
  seen[6] = config->smem, seen[7] = (long)config->stream, seen[8] = (long)function, seen[9] = *(int *)params[0];
  seen[10] = config->num_attributes ? config->attributes[0].id * 10 + config->attributes[0].value.number : 0;
  return extra != 0;
}
"""
"""Keeps what it is called with, by the layout that cuda.h gives a launch."""


@pytest.fixture
def seen(tmp_path, monkeypatch):
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    source, library = tmp_path / "driver.c", tmp_path / "driver.so"
    source.write_text(DRIVER)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    loaded = ctypes.CDLL(str(library))
    kernel_launch._launch.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: loaded)
    yield (ctypes.c_long * 12).in_dll(loaded, "seen")
    kernel_launch._launch.cache_clear()


@pytest.mark.parametrize(("attribute", "number"), [(None, 0), (COOPERATIVE, 21), (OVERLAPPING, 61)])
def test_the_driver_gets_every_field_of_a_launch_in_its_place(seen, attribute, number):
    value = ctypes.c_int(77)
    pointer = ctypes.c_void_p(ctypes.addressof(value))
    launch_kernel(1 << 40, (2, 3, 4), 256, 1 << 16, 1 << 41, ctypes.addressof(pointer), attribute, what="kernel")
    assert list(seen[:11]) == [2, 3, 4, 256, 1, 1, 1 << 16, 1 << 41, 1 << 40, 77, number]


@pytest.mark.parametrize(
    ("can_overlap", "how", "number"),
    [
        (True, {}, 61),
        (True, {"overlap": False}, 0),
        (True, {"cooperative": True}, 21),
        (False, {}, 0),
        (False, {"cooperative": True}, 21),
    ],
)
def test_a_loaded_kernel_takes_its_parameters_on_torchs_stream_and_its_shared_memory(
    seen, monkeypatch, can_overlap, how, number
):
    class Params(ctypes.Structure):
        _fields_ = [("value", ctypes.c_int)]

    asked = []
    calls = {
        "cuModuleGetFunction": lambda module, name: (asked.append((module, name)), (1 << 40,))[1],
        "cuFuncSetAttribute": lambda *arguments: (asked.append(arguments), ())[1],
    }
    put_in_place(monkeypatch, calls)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", {1: 1 << 41}.__getitem__, raising=False)
    kernels = object.__new__(DeviceKernels)
    kernels._modules, kernels._functions, kernels._smem_bytes = {"source": "module"}, {}, {}
    kernels._index, kernels._can_overlap = 1, can_overlap
    attributes = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="most")
    kernels._driver = SimpleNamespace(CUfunction=lambda handle: ("function", handle), CUfunction_attribute=attributes)
    for size in (48 << 10, 64 << 10, 60 << 10, 100 << 10):
        kernels.launch("source", "kernel", grid=(2, 3, 4), threads=256, smem_bytes=size, params=Params(77), **how)
        assert list(seen[:11]) == [2, 3, 4, 256, 1, 1, size, 1 << 41, 1 << 40, 77, number]
    function = ("function", 1 << 40)
    assert asked == [("module", b"kernel"), (function, "most", 64 << 10), (function, "most", 100 << 10)]


class DeviceTensor:
    is_cuda = True

    def __init__(self, at, dtype=torch.bfloat16):
        self._at, self.dtype = at, dtype

    def data_ptr(self):
        return self._at


class Function:
    """Stands for a `triton.jit` of (x, rows, stride, scale, y): what is 1 becomes a constant, as Triton has it."""

    def __init__(self, scratch_bytes=0):
        self.calls, self._scratch_bytes = [], scratch_bytes

    def __getitem__(self, grid):
        def launch(x, rows, stride, scale, y, **constants):
            self.calls.append((rows, stride, constants))
            kind = "constexpr" if stride == 1 else "i64" if stride > 1 << 31 else "i32"
            signature = {"x": "*bf16", "rows": "i32", "stride": kind, "scale": "fp32", "y": "*bf16", "B": "constexpr"}
            metadata = SimpleNamespace(
                global_scratch_size=self._scratch_bytes,
                profile_scratch_size=0,
                num_ctas=1,
                launch_cooperative_grid=False,
                launch_pdl=False,
                num_warps=8,
                shared=1000,
            )
            source = SimpleNamespace(signature=signature)
            return SimpleNamespace(metadata=metadata, src=source, function=len(self.calls), name="kernel")

        return launch


@pytest.fixture
def launched(monkeypatch):
    """What the driver is asked for: handle, grid, threads, shared memory, stream, and the parameters' pointers."""
    found = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)
    monkeypatch.setattr(jit_kernel, "launch_kernel", lambda *arguments, what: found.append(arguments))
    return found


def read(pointer, kind):
    return kind.from_address(pointer).value


def test_a_kind_of_arguments_is_compiled_once_and_then_launched_by_its_handle(launched):
    function = Function()
    kernel = JitKernel(function)
    for at in (1 << 20, 1 << 21, 1 << 22):
        kernel((5, 6, 1), (DeviceTensor(at), 48, 1 << 33, 0.5, DeviceTensor(at + 64)), {"B": 4})
    assert function.calls == [(48, 1 << 33, {"B": 4})]
    assert [arguments[:5] for arguments in launched] == [(1, (5, 6, 1), 256, 1000, 99)] * 2
    pointers = launched[-1][5]
    kinds = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p, ctypes.c_void_p)
    values = [read(pointer, kind) for pointer, kind in zip(pointers, kinds, strict=False)]
    assert values == [1 << 22, 48, 1 << 33, 0.5, (1 << 22) + 64, None], "the last: Triton's scratch"
    assert len(pointers) == 7


def test_what_triton_takes_for_a_constant_is_no_parameter(launched):
    kernel = JitKernel(Function())
    for _ in range(2):
        kernel((1, 1, 1), (DeviceTensor(1 << 20), 48, 1, 0.5, DeviceTensor(1 << 21)), {"B": 4})
    pointers = launched[0][5]
    assert len(pointers) == 6
    assert read(pointers[2], ctypes.c_float) == 0.5


@pytest.mark.parametrize(
    "other",
    [
        (DeviceTensor(1 << 20), 48, 1, 0.5, DeviceTensor(1 << 21)),
        (DeviceTensor(1 << 20), 48, 40, 0.5, DeviceTensor(1 << 21)),
        (DeviceTensor(1 << 20), 48, 1 << 33, 0.5, DeviceTensor(1 << 21)),
        (DeviceTensor((1 << 20) + 8), 48, 32, 0.5, DeviceTensor(1 << 21)),
        (DeviceTensor(1 << 20, torch.float16), 48, 32, 0.5, DeviceTensor(1 << 21)),
    ],
)
def test_what_triton_compiles_for_anew_is_another_form(launched, other):
    function = Function()
    kernel = JitKernel(function)
    kernel((1, 1, 1), (DeviceTensor(1 << 20), 48, 32, 0.5, DeviceTensor(1 << 21)), {"B": 4})
    kernel((1, 1, 1), other, {"B": 4})
    kernel((1, 1, 1), other, {"B": 8})
    assert len(function.calls) == 3
    assert launched == []


def test_a_function_that_needs_scratch_is_left_to_triton(launched):
    function = Function(scratch_bytes=64)
    kernel = JitKernel(function)
    for _ in range(3):
        kernel((1, 1, 1), (DeviceTensor(1 << 20), 48, 32, 0.5, DeviceTensor(1 << 21)), {"B": 4})
    assert (len(function.calls), launched) == (3, [])


def test_one_is_not_launched_as_other_odd_numbers_are(launched):
    function = Function()
    kernel = JitKernel(function)
    for stride in (3, 1, 5):
        kernel((1, 1, 1), (DeviceTensor(1 << 20), 48, stride, 0.5, DeviceTensor(1 << 21)), {"B": 4})
    assert [stride for _, stride, _ in function.calls] == [3, 1]
    assert [arguments[0] for arguments in launched] == [1], "that of 5 is the form of 3"
