"""Cache slots on their way between a home and a prefill rank: from frames straight into the peer's memory, and back."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from crosspool.backends.base import Int32Array
from crosspool.backends.cuda.channels.channel_map import LinkMap
from crosspool.backends.cuda.channels.transport_params import Flags, Slots
from crosspool.backends.cuda.chunks.chunk_crossing import cross
from crosspool.backends.cuda.chunks.row_launch import launch_rows
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.chunk_params import GatherSlotsParams, ScatterSlotsParams
from crosspool.backends.cuda.kernels.params import address
from crosspool.backends.cuda.kv_frames.cache import PagedCache
from crosspool.backends.cuda.steps.lane_memory import LaneMemory


@dataclass(frozen=True, slots=True)
class SlotPlaces:
    """Slots of a step's sequences on the device. table_rows, positions: (slots) int32."""

    table_rows: torch.Tensor
    positions: torch.Tensor

    def part(self, start: int, stop: int) -> "SlotPlaces":
        return SlotPlaces(self.table_rows[start:stop], self.positions[start:stop])

    @property
    def num_slots(self) -> int:
        return len(self.positions)


def earlier_places(num_cached: Sequence[int]) -> tuple[Int32Array, Int32Array]:
    """(table rows, positions) of all slots before a chunk's tokens; num_cached: of each of its rows."""
    counts = np.array(num_cached, dtype=np.int64)
    rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    positions = [np.arange(count, dtype=np.int32) for count in num_cached]
    return rows, np.concatenate(positions) if positions else np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class HandedCrossing:
    """One end of a lane's link between a home and a prefill rank. Everything is enqueued on torch's current stream."""

    kernels: Launcher
    lane: LaneMemory
    link: LinkMap

    def wait(self, number: int) -> None:
        """Kernels behind this one find in the inbox what the peer gave."""
        cross(self.kernels, self.lane, 1, wait_for=Flags.at([self.link.inbox.flag]), wait_layer=number)

    def tell(self, number: int) -> None:
        """Raise the peer's flag behind what earlier kernels wrote there."""
        cross(self.kernels, self.lane, 1, raise_for=Flags.at([self.link.outbox.flag]), raise_layer=number)

    def give_slots(self, number: int, cache: PagedCache, layer: int, places: SlotPlaces) -> None:
        """Copy these slots of the layer to the peer, then raise its flag."""
        if places.num_slots:
            params = GatherSlotsParams(
                cache=cache.view(layer),
                table_rows=address(places.table_rows),
                positions=address(places.positions),
                out=self.link.outbox.slot(number),
                slots=places.num_slots,
            )
            launch_rows(self.kernels, "gather_slots", places.num_slots, params)
        self.tell(number)

    def take_slots(self, number: int, cache: PagedCache, layer: int, places: SlotPlaces) -> None:
        """Put what the peer gave, and `wait` has seen, where these slots of the layer lie."""
        if places.num_slots:
            params = ScatterSlotsParams(
                cache=cache.view(layer),
                table_rows=address(places.table_rows),
                positions=address(places.positions),
                rows=self.link.inbox.slot(number),
                slots=places.num_slots,
            )
            launch_rows(self.kernels, "scatter_slots", places.num_slots, params)

    def give_rows(self, number: int, rows: torch.Tensor) -> None:
        """Copy (rows, width) fp32 to the peer, then raise its flag."""
        count, width = rows.shape
        slot = self.link.outbox.rows(number, count, width, torch.float32)
        cross(
            self.kernels,
            self.lane,
            count,
            raise_for=Flags.at([self.link.outbox.flag]),
            rows=address(rows),
            slots=Slots(slot.address),
            row_bytes=rows[0].nbytes,
            raise_layer=number,
        )
