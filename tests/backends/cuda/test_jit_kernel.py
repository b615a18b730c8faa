"""What a form takes for granted of Triton, asked of Triton's own compiler. No GPU needed."""

from __future__ import annotations

import ctypes
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton._C.libtriton import native_specialize_impl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.compiler import compile as compiled_by_triton  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from crosspool.backends.cuda.device.jit_kernel import _Form, _kind, _knows  # noqa: E402

pytestmark = pytest.mark.judge


def test_whatever_triton_tells_apart_is_of_different_kinds():
    numbers = [*range(-33, 34), *(sign * 2**31 + near for sign in (-1, 1) for near in range(-17, 18)), 1 << 40]
    memory = torch.zeros(64, dtype=torch.uint8)
    tensors = [memory[at:].view(torch.int8) for at in range(33)] + [memory[at:] for at in (0, 16, 24)]
    by_kind = {}
    for argument in (*numbers, 0.0, 1.0, 0.5, 1e30, *tensors):
        value = argument if isinstance(argument, int | float) else argument.data_ptr()
        own = native_specialize_impl(CUDABackend, argument, False, True, True)
        assert by_kind.setdefault(_kind(argument, value), own) == own, argument
    assert len(set(by_kind.values())) > 7


def taking_some_of_each(x, rows, stride, far, scale, table, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    first = tl.load(table + tl.program_id(0))
    values = tl.load(x + first * stride + at + far, mask=at < rows)
    tl.store(y + at, values * scale, mask=at < rows)


def parameters(stride):
    """Kinds of a compiled function's parameters by its text, those that a form hands over, and a block's threads."""
    names = ("x", "rows", "stride", "far", "scale", "table", "y", "BLOCK")
    kinds = dict(zip(names, ("*bf16", "i32", stride, "i64", "fp32", "*i32", "*bf16", "constexpr"), strict=True))
    constants = {"BLOCK": 64} | ({"stride": 1} if stride == "constexpr" else {})
    source = ASTSource(fn=JITFunction(taking_some_of_each), signature=kinds, constexprs=constants)
    form = _Form.of(compiled_by_triton(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}))
    entry = form.compiled.asm["ptx"].split(".entry")[1].split(")")[0]
    words = {ctypes.c_void_p: "u64", ctypes.c_int64: "u64", ctypes.c_int32: "u32", ctypes.c_float: "f32"}
    handed_over = [words[kind] for _, kind in form.params._fields_]
    return re.findall(r"\.param \.(\w+)", entry), handed_over, form.threads


def test_a_form_hands_over_what_a_compiled_function_takes(tmp_path, monkeypatch):
    """In a process of its own: Triton's interpreter leaves its language changed where other tests have used it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        for taken, handed_over, threads in process.map(parameters, ("i32", "constexpr")):
            assert taken == handed_over
            assert threads == 256


def test_a_triton_whose_launch_is_not_known_launches_itself_and_that_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr("triton.__version__", "3.7.0")
    _knows.cache_clear()
    for _ in range(2):
        assert _Form.of(SimpleNamespace(metadata=SimpleNamespace())) is None
    (told,) = caplog.messages
    assert "Triton 3.7.0" in told
