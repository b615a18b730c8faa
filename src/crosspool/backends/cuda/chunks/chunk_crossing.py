"""Crossings of a chunk's pieces: the same flags, slots and kernels as a pass's, in bulk.

A wait is one block, so that it holds one multiprocessor's corner and not the device while a peer works.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from crosspool.backends.cuda.channels.channel_map import ChannelMap, LinkMap, Rows
from crosspool.backends.cuda.channels.transport_params import CrossParams, Flags, Slots
from crosspool.backends.cuda.chunks.chunk_plan import ChunkPlan, Piece
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.chunk_params import TakeRowsParams
from crosspool.backends.cuda.kernels.params import address, check
from crosspool.backends.cuda.steps.lane_memory import LaneMemory
from crosspool.backends.cuda.steps.passes import PASS_TOKENS

_BLOCK = 256
_WORD_BYTES = 8


@dataclass(frozen=True)
class ChunkCrossing:
    """One side of a lane: `links` are one for each weights rank on a KV rank, and one on a weights rank."""

    kernels: Launcher
    lane: LaneMemory
    links: Sequence[LinkMap]
    plan: ChunkPlan
    hidden: int

    def wait(self, layer: int, piece: Piece) -> None:
        """Kernels behind this one find every peer's rows of the layer in their slots."""
        wait_for = Flags.at([link.inbox.flag for link in self.links])
        cross(self.kernels, self.lane, 1, wait_for=wait_for, wait_layer=self.plan.crossing(layer, piece))

    def raise_flags(self, layer: int, piece: Piece) -> None:
        """Tell the peers that what earlier kernels wrote to their slots is there."""
        raise_for = Flags.at([link.outbox.flag for link in self.links])
        cross(self.kernels, self.lane, 1, raise_for=raise_for, raise_layer=self.plan.crossing(layer, piece))

    def put(self, layer: int, piece: Piece, rows: torch.Tensor) -> None:
        """Copy (tokens, hidden) bf16 to every peer's slot, then raise the flags."""
        check("rows", rows, (piece.num_tokens, self.hidden), torch.bfloat16)
        raise_for = Flags.at([link.outbox.flag for link in self.links])
        slots = [place(link.outbox, layer, piece, self.hidden, torch.bfloat16).address for link in self.links]
        cross(
            self.kernels,
            self.lane,
            piece.num_tokens,
            raise_for=raise_for,
            rows=address(rows),
            slots=Slots(*slots),
            row_bytes=self.hidden * rows.element_size(),
            raise_layer=self.plan.crossing(layer, piece),
        )

    def received(self, layer: int, piece: Piece, dtype: torch.dtype) -> list[Rows]:
        """Where each peer's rows of the layer lie here once `wait` has ended."""
        return [place(link.inbox, layer, piece, self.hidden, dtype) for link in self.links]

    def sums(self, layer: int, piece: Piece) -> Rows:
        """Where a weights rank's partial sums go, in the KV rank's memory: fp32."""
        return place(self.links[0].outbox, layer, piece, self.hidden, torch.float32)

    def clear_words(self) -> None:
        """Zero what later passes read as words with an epoch each: a chunk's sums must not be taken for any.

        On a KV rank, after its last sums were read.
        """
        num_bytes = min(PASS_TOKENS * self.hidden * _WORD_BYTES, 4 * self.links[0].inbox.capacity)
        zeros = torch.zeros(num_bytes, dtype=torch.uint8, device=self.lane.device)
        for link in self.links:
            for parity in (0, 1):
                params = TakeRowsParams(rows=address(zeros), out=link.inbox.slot(parity), bytes=num_bytes // 16 * 16)
                self.kernels.launch(
                    "chunk_ffn",
                    "take_rows",
                    grid=(16, 1, 1),
                    threads=_BLOCK,
                    smem_bytes=0,
                    params=params,
                    overlap=False,
                )


def cross(kernels: Launcher, lane: LaneMemory, blocks: int, **fields: object) -> None:
    """Enqueue a wait, a copy (a block a row) and a raised flag, each where `fields` (of `CrossParams`) name it."""
    params = CrossParams(view=lane.view(), **fields)
    kernels.launch(
        "transport",
        "cross",
        grid=(blocks, 1, 1),
        threads=_BLOCK,
        smem_bytes=256,
        params=params,
        overlap=False,
    )


def place(channel: ChannelMap, layer: int, piece: Piece, hidden: int, dtype: torch.dtype) -> Rows:
    """A piece's rows within the slot of a layer."""
    whole = channel.rows(layer, piece.stop, hidden, dtype)
    return replace(
        whole, address=whole.address + piece.start * hidden * dtype.itemsize, shape=(piece.num_tokens, hidden)
    )
