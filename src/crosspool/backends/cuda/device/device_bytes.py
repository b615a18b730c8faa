"""Bytes at a device address as a torch tensor, which does not own them."""

import numpy as np
import torch


class DeviceBytes:
    """As torch takes them."""

    def __init__(self, base: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": np.dtype(np.uint8).str,
            "data": (base, False),
            "version": 3,
        }


def device_bytes(base: int, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """uint8 of this shape at `base` on a GPU; whoever made the memory keeps it for as long."""
    return torch.as_tensor(DeviceBytes(base, shape), device=device)
