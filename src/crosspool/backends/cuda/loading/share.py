"""A rank's share of a checkpoint as it is being filled: its tensors on the device, and plans of what goes where."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch

from crosspool.models.tensors import FLOAT32_TENSORS
from crosspool.weights_pool.checkpoint import ITEM_BYTES, Checkpoint
from crosspool.weights_pool.extents import Extent, Part, extents, joined, shortened
from crosspool.weights_pool.loader import LoadPlan, payload_bytes
from crosspool.weights_pool.parts import parts

Tensors = dict[str, torch.Tensor]
Room = Callable[[int | None, tuple[int, ...], torch.dtype], torch.Tensor]
"""(layer, shape, dtype): zeroed memory for a tensor."""

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

PARTS_AT_ONCE = 2
"""Parts of the next layer that are planned between two extents: about as many as an extent has."""


@dataclass
class Share:
    """make_plan: `plan_load` of this share. room: where tensors lie on `device`; None: in memory of their own.

    total: bytes, as soon as they are known.
    """

    num_layers: int
    make_plan: Callable[[Checkpoint], LoadPlan]
    device: torch.device
    room: Room | None = None
    model: Tensors = field(default_factory=dict)
    layers: list[Tensors] = field(init=False)
    total: int = 0

    def __post_init__(self) -> None:
        self.layers = [{} for _ in range(self.num_layers)]

    def plans(self, checkpoint: Checkpoint, extent_bytes: int) -> Iterator[list[Extent] | None]:
        """Memory for each layer, and its extents; None between the bits of a plan."""
        plan = self.make_plan(checkpoint)
        self.total = payload_bytes(checkpoint, plan)
        for layer, destinations in groupby(plan.destinations, key=lambda each: each.tensor.layer):
            part = replace(plan, destinations=tuple(destinations))
            self._allocate(layer, part)
            members: list[Part] = []
            for member in parts(checkpoint, part, extent_bytes // 2, is_plain):
                members.append(member)
                if len(members) % PARTS_AT_ONCE == 0:
                    yield None
            whole = (joined(extent, is_plain) for extent in extents(members, extent_bytes))
            yield [each for extent in whole for each in shortened(extent, is_plain, extent_bytes)]

    def target(self, part: Part) -> torch.Tensor:
        """The tensor that a part belongs to."""
        return self._holder(part.read.tensor.layer)[part.read.tensor.name]

    def address(self, part: Part) -> int | None:
        """Where a part goes as it is stored; None: it must be arranged."""
        if part.at is None or not is_plain(part):
            return None
        return self.target(part).data_ptr() + part.at * ITEM_BYTES[part.dtype]

    def _allocate(self, layer: int | None, plan: LoadPlan) -> None:
        holder = self._holder(layer)
        for destination in plan.destinations:
            name = destination.tensor.name
            if self.room is not None:
                holder[name] = self.room(layer, destination.shape, held_dtype(name))
                continue
            make = torch.zeros if destination.is_zero else torch.empty
            holder[name] = make(destination.shape, dtype=held_dtype(name), device=self.device)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # memory freed just now may still be in use there

    def _holder(self, layer: int | None) -> Tensors:
        return self.model if layer is None else self.layers[layer]


def held_dtype(name: str) -> torch.dtype:
    return torch.float32 if name in FLOAT32_TENSORS else torch.bfloat16


def is_plain(part: Part) -> bool:
    """Whether what is stored is what is held."""
    return DTYPES[part.dtype] == held_dtype(part.read.tensor.name)


def arrange(part: Part, stored: torch.Tensor, destination: torch.Tensor) -> None:
    """Put a part, its bytes on the destination's device, where it belongs: cut, turned and cast there."""
    region = part.read.region
    value = torch.as_strided(stored.view(DTYPES[part.dtype]), part.shape, part.strides)
    if region.pick:
        value = value[region.pick]
    if region.transpose:
        value = value.transpose(-1, -2)
    destination[region.index].copy_(value if value.ndim == len(region.index) else value.unsqueeze(0))
