"""Loads compiled kernels onto one device and launches them on torch's current stream."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from crosspool.backends.cuda.device.compile import architecture, cubin
from crosspool.backends.cuda.device.driver import call
from crosspool.backends.cuda.device.kernel_launch import COOPERATIVE, OVERLAPPING, launch_kernel

SOURCES = (
    "gemv",
    "norm",
    "rope",
    "attention",
    "router",
    "moe",
    "moe_fused",
    "ffn_server",
    "ffn_client",
    "transport",
    "exchange",
    "lane_steps",
    "sample",
    "chunk_ffn",
    "chunk_attention",
)

SHARED_FIRST = frozenset(("gemv", "norm", "rope", "attention", "transport", "exchange", "lane_steps", "sample"))
"""Sources of an attention half: their kernels all take the largest part of L1 for shared memory. A multiprocessor
divides the two anew only while no block runs on it, so a kernel that wants more would start when the one before has
ended."""


class Launcher(Protocol):
    """Runs one kernel. The tests' CPU emulator is the other implementation."""

    num_sms: int
    """Multiprocessors of the device."""
    is_hopper: bool
    """Compute capability 9.0 or later: 227 KiB of shared memory a block, kernels that overlap."""
    has_warpgroups: bool
    """Compute capability 9.0: products of four warps."""
    has_clusters: bool
    """Compute capability 9.0 or later, and no kernel that stays holds most of the device: clusters of blocks do not
    start beside one."""

    def launch(
        self,
        source: str,
        kernel: str,
        *,
        grid: tuple[int, int, int],
        threads: int,
        smem_bytes: int,
        params: ctypes.Structure,
        overlap: bool = True,
        cooperative: bool = False,
    ) -> None:
        """Enqueue `kernel` of `csrc/<source>.cu`; `params` is copied before the call returns.

        overlap: the kernel may start while the one before it still runs (it waits itself before it reads that one's
        results). Pass False after anything but our kernels wrote what a kernel reads before its own wait: weights,
        sequence lengths, frame tables.
        cooperative: blocks wait for each other, so the grid must fit the device whole; such a kernel never overlaps the
        one before it.
        """
        ...


class DeviceKernels:
    """Every kernel, loaded eagerly: lazy loading can deadlock against a kernel that spins."""

    def __init__(self, device: torch.device, cache_dir: Path | None = None) -> None:
        from cuda.bindings import driver

        self.device = device
        self._driver = driver
        self._functions: dict[str, int] = {}
        self._smem_bytes: dict[str, int] = {}
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # makes torch's primary context current
            self._index = torch.cuda.current_device()
            capability = torch.cuda.get_device_capability(device)
            self.is_hopper = self.has_clusters = self._can_overlap = capability[0] >= 9
            self.has_warpgroups = capability[0] == 9
            self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
            arch = architecture(capability)
            with ThreadPoolExecutor() as pool:  # the compiler runs in processes of its own
                cubins = list(pool.map(lambda source: cubin(source, arch, cache_dir), SOURCES))
            self._modules = {
                source: call("cuModuleLoadData", path.read_bytes())
                for source, path in zip(SOURCES, cubins, strict=True)
            }
            for source, module in self._modules.items():
                self._load_functions(module, source in SHARED_FIRST)

    def launch(
        self,
        source: str,
        kernel: str,
        *,
        grid: tuple[int, int, int],
        threads: int,
        smem_bytes: int,
        params: ctypes.Structure,
        overlap: bool = True,
        cooperative: bool = False,
    ) -> None:
        function = self._function(source, kernel, smem_bytes)
        attribute = OVERLAPPING if overlap and self._can_overlap else None
        stream, arguments = torch._C._cuda_getCurrentRawStream(self._index), ctypes.c_void_p(ctypes.addressof(params))
        launch_kernel(
            function,
            grid,
            threads,
            smem_bytes,
            stream,
            ctypes.addressof(arguments),
            COOPERATIVE if cooperative else attribute,
            what=kernel,
        )

    def _load_functions(self, module: Any, shared_first: bool) -> None:
        """Load every kernel now, also where the driver would put it off to the first launch."""
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        count = call("cuModuleGetFunctionCount", module)
        for function in call("cuModuleEnumerateFunctions", count, module):
            call("cuFuncLoad", function)
            if shared_first:
                call("cuFuncSetAttribute", function, attribute, 100)

    def _function(self, source: str, kernel: str, smem_bytes: int) -> int:
        """The driver's handle."""
        function = self._functions.get(kernel)
        if function is None:
            function = int(call("cuModuleGetFunction", self._modules[source], kernel.encode(), what=kernel))
            self._functions[kernel] = function
        if smem_bytes > max(48 * 1024, self._smem_bytes.get(kernel, 0)):
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            handle = self._driver.CUfunction(function)
            call("cuFuncSetAttribute", handle, attribute, smem_bytes, what=kernel)
            self._smem_bytes[kernel] = smem_bytes
        return function
