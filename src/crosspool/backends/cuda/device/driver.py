"""Thin wrappers around cuda-bindings: a failed call raises an error that names the call and the rank."""

from dataclasses import dataclass
from typing import Any


class CudaError(RuntimeError):
    """A driver call failed; the message names it."""


def call(name: str, *arguments: Any, rank: str = "", what: str = "") -> Any:
    """The result of `name`, or None where it has none. Raises CudaError, which says whose call and of what it was."""
    from cuda.bindings import driver  # only where the CUDA backend runs

    status, *results = getattr(driver, name)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise CudaError(f"{rank and rank + ': '}{name}{what and ' of ' + what} failed: {status.name}")
    return results[0] if results else None


@dataclass(frozen=True)
class Driver:
    """Driver calls of one rank."""

    rank: str

    def call(self, name: str, *arguments: Any) -> Any:
        """The result of `name`, or None where it has none. Raises CudaError."""
        return call(name, *arguments, rank=self.rank)

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Whether kernels on `device` can reach memory of `peer`."""
        return device == peer or bool(self.call("cuDeviceCanAccessPeer", self.device(device), self.device(peer)))

    def reach_each_other(self, device: int, peer: int) -> bool:
        return self.can_access_peer(device, peer) and self.can_access_peer(peer, device)

    def device(self, index: int) -> Any:
        self.call("cuInit", 0)
        return self.call("cuDeviceGet", index)

    def enable_peer_access(self, peer: int) -> None:
        """Let kernels of the current device reach plain allocations of `peer` in this process."""
        from cuda.bindings import driver

        context = self.call("cuDevicePrimaryCtxRetain", self.device(peer))
        (status,) = driver.cuCtxEnablePeerAccess(context, 0)
        if status not in (driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED):
            raise CudaError(f"{self.rank}: cuCtxEnablePeerAccess to device {peer} failed: {status.name}")
