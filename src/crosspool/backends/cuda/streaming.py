"""A rank's share of a checkpoint, streamed tensor by tensor to its device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from crosspool.backends.base import Progress
from crosspool.models.directory import ModelDirectory
from crosspool.models.tensors import FLOAT32_TENSORS, Pool
from crosspool.weights_pool.checkpoint import Checkpoint
from crosspool.weights_pool.loader import iter_pieces, plan_load

Tensors = dict[str, torch.Tensor]


def stream_share(
    directory: ModelDirectory,
    pool: Pool,
    device: torch.device,
    progress: Progress,
    slice_index: int = 0,
    num_slices: int = 1,
    shares: Sequence[float] | None = None,
) -> tuple[Tensors, list[Tensors]]:
    """(the model's own tensors, those of each layer): bf16, the router's fp32.

    Host memory beyond the page cache is one piece. An error leaves nothing allocated.
    """
    model: Tensors = {}
    layers: list[Tensors] = [{} for _ in range(directory.spec.num_layers)]
    with Checkpoint(directory.path) as checkpoint:
        plan = plan_load(checkpoint, directory, pool, slice_index, num_slices, shares)
        for destination in plan.destinations:
            name, layer = destination.tensor.name, destination.tensor.layer
            dtype = torch.float32 if name in FLOAT32_TENSORS else torch.bfloat16
            make = torch.zeros if destination.is_zero else torch.empty
            holder = model if layer is None else layers[layer]
            holder[name] = make(destination.shape, dtype=dtype, device=device)
        loaded = 0
        for piece in iter_pieces(checkpoint, plan):
            holder = model if piece.tensor.layer is None else layers[piece.tensor.layer]
            holder[piece.tensor.name][piece.index].copy_(as_tensor(piece.array))
            loaded += piece.array.nbytes
            progress(loaded, plan.total_bytes)
    return model, layers


def as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A CPU tensor of the array's dtype, bfloat16 included."""
    whole = np.ascontiguousarray(array)
    if not whole.flags.writeable:
        whole = whole.copy()
    if whole.dtype.name == "bfloat16":
        return torch.from_numpy(whole.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(whole)
