"""What a rank's GPU memory is used for, also where it does not suffice."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from crosspool.kv_pool.backing.driver import NoMemoryError
from crosspool.units import GiB

Consumers = Mapping[str, int]
"""Bytes by what they are for."""


_known_bytes: dict[torch.device, dict[str, tuple[int, int]]] = {}
"""By GPU and rank of this process: bytes whose use is known, and those of them that are not torch's."""


def remainder(rank: str, device: torch.device, known: Consumers, num_mapped_bytes: int = 0) -> dict[str, int]:
    """The GPU's other bytes in use: `workspace`, torch's beyond what is known; `other`, contexts and other processes.

    With `known` of all ranks that this process has there they add up to what the device reports as used; the first of
    those ranks tells them. num_mapped_bytes: of the KV cache, where the driver maps it and torch does not know of it.
    """
    if device.type != "cuda":
        return {"workspace": 0, "other": 0}
    ranks = _known_bytes.setdefault(device, {})
    ranks[rank] = (sum(known.values()), known.get("graphs", 0) + known.get("channels", 0) + num_mapped_bytes)
    if rank != next(iter(ranks)):
        return {"workspace": 0, "other": 0}
    in_all, outside = (sum(sizes) for sizes in zip(*ranks.values(), strict=True))
    free, total = torch.cuda.mem_get_info(device)
    workspace = max(0, torch.cuda.memory_reserved(device) - in_all + outside)
    return {"workspace": workspace, "other": max(0, total - free - in_all - workspace)}


REMEDY = "lower kv_pool_bytes, serve fewer models, or give the models more weights ranks"


@contextmanager
def naming_consumers(
    rank: str, device: torch.device, wanted: str, consumers: Callable[[], Consumers], remedy: str = REMEDY
) -> Iterator[None]:
    """Turn running out of memory into a ValueError that says what the memory is used for, in GiB."""
    try:
        yield
    except (torch.OutOfMemoryError, NoMemoryError):
        free, total = torch.cuda.mem_get_info(device)
        held = {name: size for name, size in consumers().items() if size > 0}
        held["everything else on this GPU"] = max(0, total - free - sum(held.values()))
        parts = ", ".join(
            f"{name} {size / GiB:.1f} GiB" for name, size in sorted(held.items(), key=lambda item: -item[1])
        )
        raise ValueError(
            f"{rank}: GPU {device.index} has no room for {wanted}: {parts}; {free / GiB:.1f} of {total / GiB:.1f} GiB "
            f"are free: {remedy}"
        ) from None


def pinned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed host memory that the device reads and writes by the same address."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
