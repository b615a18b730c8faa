"""JitKernel: a Triton function whose compiled forms the driver launches itself.

Triton looks at every argument of every launch, and finds the form compiled for such arguments by a key of their types;
that takes the host four times as long as the launch. Here it is asked once for each kind of arguments.
"""

import ctypes
import logging
import sys
import threading
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from crosspool.backends.cuda.device.kernel_launch import launch_kernel

logger = logging.getLogger(__name__)

_TYPES: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
_WARP = 32
_KNOWN_TRITON = "3.6."
"""Triton's versions whose compiled functions take two scratch addresses last; others launch for themselves."""


@dataclass(frozen=True)
class _Form:
    """A function compiled for one kind of arguments. taken: which of them it has, by their places."""

    compiled: Any  # Triton's, which keeps the function loaded
    function: int
    threads: int
    smem_bytes: int
    taken: tuple[int, ...]
    params: ctypes.Structure
    pointers: Any  # to each of `params`, whose address stays the same
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, compiled: Any) -> "_Form | None":
        """None where there is none, as in the interpreter, or where Triton does more for a launch than this does."""
        metadata = getattr(compiled, "metadata", None)
        if metadata is None or not _knows(sys.modules["triton"].__version__):
            return None
        if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas != 1:
            return None
        if metadata.launch_cooperative_grid or metadata.launch_pdl:
            return None
        kinds = [*enumerate(compiled.src.signature.values())]
        taken = [(place, kind) for place, kind in kinds if kind != "constexpr"]
        if any(kind[0] != "*" and kind not in _TYPES for _, kind in taken):
            return None
        fields = [(f"_{place}", ctypes.c_void_p if kind[0] == "*" else _TYPES[kind]) for place, kind in taken]
        scratch = [("global_scratch", ctypes.c_void_p), ("profile_scratch", ctypes.c_void_p)]
        shape = type("Params", (ctypes.Structure,), {"_fields_": [*fields, *scratch]})
        params = shape()
        offsets = [getattr(shape, name).offset for name, _ in (*fields, *scratch)]
        pointers = (ctypes.c_void_p * len(offsets))(*[ctypes.addressof(params) + offset for offset in offsets])
        places, threads = tuple(place for place, _ in taken), _WARP * metadata.num_warps
        return cls(compiled, compiled.function, threads, metadata.shared, places, params, pointers)

    def launch(self, grid: tuple[int, int, int], arguments: tuple[Any, ...], stream: int) -> None:
        """arguments: numbers, and tensors by their addresses."""
        with self.lock:
            self.params.__init__(*[arguments[place] for place in self.taken])  # type: ignore[misc]
            launch_kernel(
                self.function, grid, self.threads, self.smem_bytes, stream, self.pointers, what=self.compiled.name
            )


class JitKernel:
    """function: a `triton.jit`, whose constants all come by name."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._forms: dict[tuple[Any, ...], _Form | None] = {}

    def __call__(self, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Enqueue it on torch's current stream.

        arguments: tensors, the first of them one, and numbers. constants: options of the compiler too.
        """
        if not arguments[0].is_cuda:
            self._function[grid](*arguments, **constants)
            return
        device = torch.cuda.current_device()
        values = tuple([each if isinstance(each, int | float) else each.data_ptr() for each in arguments])
        key = (device, *constants.values(), *map(_kind, arguments, values))
        form = self._forms.get(key)
        if form is None:
            compiled = self._function[grid](*arguments, **constants)
            if key not in self._forms:
                self._forms[key] = _Form.of(compiled)
            return
        form.launch(grid, values, torch._C._cuda_getCurrentRawStream(device))


@cache
def _knows(version: str) -> bool:
    """Whether this Triton's compiled functions can be launched here. Said once: prompts cost the host more without."""
    is_known = version.startswith(_KNOWN_TRITON)
    if not is_known:
        logger.warning(
            "Triton %s launches its kernels itself, so prompts take the host longer; those of Triton %sx are launched "
            "by the driver",
            version,
            _KNOWN_TRITON,
        )
    return is_known


def _kind(argument: Any, value: Any) -> Any:
    """What Triton compiles for: at least as fine as its own distinctions."""
    if isinstance(value, float):
        return float
    if argument is not value:
        return argument.dtype, value % 16 == 0
    return value == 1, value % 16 == 0, -(1 << 31) <= value < 1 << 31
