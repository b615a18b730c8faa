"""Brings whole models from pinned host memory to places on the device, a layer a copy, while chunks run.

A chunk waits for each layer's own copy: the first layers of a prompt run while the last ones are still on their way.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from crosspool.backends.cuda.device.driver import call
from crosspool.backends.cuda.device.queues import own_stream
from crosspool.backends.cuda.loading.weights import WholeWeights, mapped
from crosspool.backends.cuda.prefill_rank.host_blob import view
from crosspool.backends.cuda.prefill_rank.host_model import OWN, HostModel
from crosspool.backends.cuda.prefill_rank.places import Place

NUM_STREAMS = 2
"""One copy begins while the one before it ends."""


@dataclass(frozen=True)
class InPlace:
    """A model's weights in a place; arrived: by group, the event behind its copy, none without a device."""

    weights: WholeWeights
    arrived: Mapping[Hashable, Any]
    begin: Any = None

    def await_own(self) -> None:
        """Kernels behind this on torch's current stream find the model's own tensors."""
        self._await(OWN)

    def await_layer(self, layer: int) -> None:
        """The same for one layer's."""
        self._await(layer)

    def seconds(self) -> float | None:
        """From the first copy to the end of the last; None while they run, or without a device."""
        events = tuple(self.arrived.values())
        if self.begin is None or not all(event.query() for event in events):
            return None
        return max(float(self.begin.elapsed_time(event)) for event in events) / 1e3

    def _await(self, group: Hashable) -> None:
        event = self.arrived.get(group)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


class Swapper:
    """The copies of one prefill rank, in the order in which they are asked for."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._streams = [own_stream(device) for _ in range(NUM_STREAMS)] if is_cuda else []

    def bring(self, model: HostModel, place: Place) -> InPlace:
        """Enqueue the model's copies to the place, which no kernel reads; returns at once."""
        weights = in_memory(model, place.memory)
        groups = model.blob.groups
        if not self._streams:
            place.memory[: model.num_bytes].copy_(model.blob.memory)
            return InPlace(weights, {})
        for stream in self._streams:  # an earlier model's copies may be meant for the same bytes
            for other in self._streams:
                if other is not stream:
                    stream.wait_stream(other)
        begin = torch.cuda.Event(enable_timing=True)
        begin.record(self._streams[0])
        arrived = {}
        for number, (name, group) in enumerate(groups.items()):
            stream = self._streams[number % len(self._streams)]
            with torch.cuda.stream(stream):
                copy_in(place.memory, model.blob.memory, group.start, group.stop, stream)
            arrived[name] = torch.cuda.Event(enable_timing=True)
            arrived[name].record(stream)
        return InPlace(weights, arrived, begin)

    def settle(self) -> None:
        """Wait until every copy has ended."""
        for stream in self._streams:
            stream.synchronize()


def copy_in(to: torch.Tensor, source: torch.Tensor, start: int, stop: int, stream: Any) -> None:
    """Enqueue bytes [start, stop) of pinned host memory to the same ones of a device's."""
    at, source_at, size = to.data_ptr() + start, source.data_ptr() + start, stop - start
    call("cuMemcpyHtoDAsync", at, source_at, size, stream.cuda_stream, what=f"{size} bytes to {to.device}")


def in_memory(model: HostModel, memory: torch.Tensor) -> WholeWeights:
    """The model's weights in (bytes) uint8 memory that holds the bytes of its blob."""

    def there(tensor: torch.Tensor) -> torch.Tensor:
        offset = model.blob.offset(tensor)
        assert offset is not None, "a tensor of a whole model lies outside its blob"
        return view(memory, offset, tuple(tensor.shape), tensor.dtype)

    layers = tuple(mapped(layer, there) for layer in model.weights.layers)
    return replace(
        model.weights,
        embed=there(model.weights.embed),
        final_norm=there(model.weights.final_norm),
        layers=layers,
    )
