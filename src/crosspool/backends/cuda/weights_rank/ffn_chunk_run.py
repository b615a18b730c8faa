"""Runs a chunk of prompts on a weights rank, once fused passes have ended."""

from collections.abc import Callable, Iterator

import torch

from crosspool.backends.base import HalfStep, Wait
from crosspool.backends.cuda.channels.link import OPEN_EPOCH, DeviceInlet
from crosspool.backends.cuda.chunks.chunk_crossing import ChunkCrossing
from crosspool.backends.cuda.chunks.chunk_ffn import ChunkFFN
from crosspool.backends.cuda.chunks.chunk_plan import ChunkPlan, chunk_plan
from crosspool.backends.cuda.chunks.chunk_run import run_pieces
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.steps.step_on_device import StepOnDevice
from crosspool.backends.cuda.weights_rank.ffn_passes import FFNPasses, FFNWay
from crosspool.backends.cuda.weights_rank.fused_turns import FusedTurns, NoneFused
from crosspool.backends.cuda.weights_rank.patience import Patience
from crosspool.backends.cuda.weights_rank.resident_ffn import ResidentFFN
from crosspool.scheduler.step import StepHeader


def ffn_chunk(ffn: ChunkFFN, crossing: ChunkCrossing, plan: ChunkPlan, patience: Patience) -> Iterator[int]:
    """Enqueue the chunk's kernels on torch's current stream; yields each crossing's number before its wait."""
    for layer in range(plan.num_layers):
        for piece in plan.pieces:
            yield plan.crossing(layer, piece)
            crossing.wait(layer, piece)
            (rows,) = crossing.received(layer, piece, torch.bfloat16)
            with patience.timed(piece.num_tokens):
                ffn.run(layer, ffn.take(rows), crossing.sums(layer, piece))
            crossing.raise_flags(layer, piece)


def run_ffn_chunk(
    kernels: Launcher,
    found: FFNPasses,
    resident: ResidentFFN | None,
    turns: FusedTurns,
    header: StepHeader,
    way: FFNWay,
    inlet: DeviceInlet,
    has_neighbours: Callable[[], bool],
    patience: Patience,
) -> HalfStep[None]:
    """The chunk's kernels, and a wait for their end. inlet: of the way's link; has_neighbours: of `run_pieces`."""
    lane, spec = way.lane, way.model.spec
    plan = chunk_plan(header.num_tokens, header.step_seq, spec.num_layers)
    yield Wait((lane.idle, inlet), OPEN_EPOCH)
    ffn = found.chunks_of(way.model, way.lane_number)
    crossing = ChunkCrossing(kernels, lane.memory, [inlet.link.map()], plan, spec.hidden_size)
    with StepOnDevice(lane, plan.last_epoch):
        turns.chunk_lanes.add(header.lane)
        try:
            if turns.fused_lanes:  # each of their layers would wait for the chunk; passes that follow are not fused
                yield Wait((NoneFused(turns),), OPEN_EPOCH)
            if resident is not None:
                resident.before_launch(lane)
            enqueued = ffn_chunk(ffn, crossing, plan, patience)
            yield from run_pieces(kernels, lane, (inlet,), plan, enqueued, has_neighbours, patience)
            yield Wait((inlet,), plan.last_epoch)
        finally:
            turns.chunk_lanes.discard(header.lane)
