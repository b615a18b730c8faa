"""Runs the CUDA kernels' own source on a CPU: compiled with g++ against `emulator.h`, one fiber a thread."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from crosspool.backends.cuda.device.compile import SOURCES

HERE = Path(__file__).parent


class EmulatedKernels:
    """The launcher of `backends/cuda` for CPU tensors."""

    def __init__(self, *, num_sms: int = 8, backwards: bool = False, is_hopper: bool = True) -> None:
        self.num_sms, self.backwards, self.is_hopper = num_sms, backwards, is_hopper
        self.has_warpgroups = self.has_clusters = is_hopper
        self._libraries: dict[str, ctypes.CDLL] = {}
        self.launches: list[tuple[str, tuple[int, int, int], int]] = []

    def launch(self, source, kernel, *, grid, threads, smem_bytes, params, overlap=True, cooperative=False):
        library = self._library(source)
        expected = getattr(library, f"{kernel}_params_bytes")()
        assert expected == ctypes.sizeof(params), f"{kernel}: {type(params).__name__} differs from the C++ struct"
        self.launches.append((kernel, grid, threads))
        library.set_order(self.backwards, cooperative)
        getattr(library, kernel)(ctypes.byref(params), (ctypes.c_uint * 3)(*grid), threads, smem_bytes)

    def looks_after_release(self, source: str) -> int:
        """Since the last call: looks for a peer's words by blocks that had let the kernels behind theirs begin."""
        found: int = self._library(source).take_looks_after_release()
        return found

    def overwrite_late(self, source: str, address: int, words: Sequence[int]) -> None:
        """From now on blocks of odd numbers find these where all read 32-bit words that a peer wrote; none: no more."""
        given = (ctypes.c_uint32 * len(words))(*words)
        self._library(source).overwrite_late(ctypes.c_void_p(address), given, len(words))

    def _library(self, source: str) -> ctypes.CDLL:
        if source not in self._libraries:
            self._libraries[source] = ctypes.CDLL(str(_build(source, self.is_hopper)))
        return self._libraries[source]


def _build(source: str, is_hopper: bool) -> Path:
    digest = hashlib.sha256((HERE / "emulator.h").read_bytes())
    for path in sorted(SOURCES.glob("*.cu*")):
        digest.update(path.read_bytes())
    digest.update(str(is_hopper).encode())
    target = Path(tempfile.gettempdir()) / f"crosspool-emulated-{source}-{digest.hexdigest()[:16]}.so"
    with target.with_suffix(".lock").open("w") as lock:  # of several test workers one compiles, the others take it over
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(source, target, is_hopper)
    return target


def _compile(source: str, target: Path, is_hopper: bool) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        scratch = Path(folder) / target.name
        command = ["g++", "-x", "c++", "-std=c++20", "-O2", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", "-w"]
        flags = ["-DCROSSPOOL_EMULATOR", f"-I{HERE}", f"-I{SOURCES}"]
        if not is_hopper:
            flags.append("-DCROSSPOOL_SMALL_SMEM")
        subprocess.run([*command, *flags, "-o", scratch, SOURCES / f"{source}.cu"], check=True)
        scratch.rename(target)
