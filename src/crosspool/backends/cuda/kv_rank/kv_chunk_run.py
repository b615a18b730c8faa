"""Runs a chunk of prompts on the KV rank, with graphs for its spans where no other chunk of the model has them."""

from collections.abc import Callable, Iterator, Sequence

from crosspool.backends.base import HalfStep, Wait
from crosspool.backends.cuda.channels.link import OPEN_EPOCH, DeviceInlet
from crosspool.backends.cuda.chunks.chunk_crossing import ChunkCrossing
from crosspool.backends.cuda.chunks.chunk_half import ChunkHalf
from crosspool.backends.cuda.chunks.chunk_plan import chunk_plan
from crosspool.backends.cuda.chunks.chunk_rows import ChunkRows
from crosspool.backends.cuda.chunks.chunk_run import ENDLESS, Crossings, run_pieces
from crosspool.backends.cuda.chunks.prefill_piece import Library
from crosspool.backends.cuda.chunks.span_attention import SpanGraphs
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.joined import joined_chunk
from crosspool.backends.cuda.kv_rank.kv_chunk import kv_chunk
from crosspool.backends.cuda.kv_rank.kv_models import KVModel
from crosspool.backends.cuda.kv_rank.kv_passes import KVWay
from crosspool.backends.cuda.steps.batch import Batch
from crosspool.backends.cuda.steps.lane import WorkerLane
from crosspool.backends.cuda.steps.lane_memory import LaneMemory
from crosspool.backends.cuda.steps.outcome import Outcome
from crosspool.backends.cuda.steps.step_on_device import StepOnDevice
from crosspool.backends.cuda.weights_rank.patience import Patience
from crosspool.core import SampledToken
from crosspool.models.spec import GQASpec, MLASpec
from crosspool.scheduler.step import StepHeader


def run_kv_chunk(
    kernels: Launcher,
    header: StepHeader,
    way: KVWay,
    inlets: Sequence[DeviceInlet],
    batch: Batch,
    has_neighbours: Callable[[], bool],
) -> HalfStep[tuple[SampledToken, ...]]:
    """The chunk's kernels and the tokens of rows that end here. has_neighbours: of `run_pieces`."""
    model, lane = way.model, way.lane
    plan = chunk_plan(header.num_tokens, header.step_seq, model.spec.num_layers)
    yield Wait((lane.idle, *inlets), OPEN_EPOCH)
    outcome = Outcome(batch, lane)
    graphs = take_graphs(model, lane.memory)
    streams = lane.prefill_streams if graphs else None

    def is_shared() -> bool:
        return streams is not None and streams.is_shared

    libraries = {shape: Library(each, is_shared) for shape, each in graphs.items()}

    def make_half() -> ChunkHalf:
        rows = ChunkRows.of(batch)
        return ChunkHalf(kernels, model.spec, model.weights, model.frames, model.geometry, rows, plan, None, libraries)

    patience = ENDLESS
    if way.joined is None:
        maps = [link.map() for link in way.links]
        crossing = ChunkCrossing(kernels, lane.memory, maps, plan, model.spec.hidden_size)
        enqueued = kv_chunk(kernels, make_half, crossing, plan, batch, outcome)
    else:
        ffn, patience = way.joined.chunks_of(way.model_name, way.lane_number), way.joined.patience
        enqueued = joined_chunk(kernels, make_half, ffn, patience, plan, batch, outcome)
    tokens = yield from run_to_end(kernels, lane, inlets, plan, enqueued, has_neighbours, outcome, patience)
    for each in graphs.values():
        each.user = None
    return tokens


def run_to_end(
    kernels: Launcher,
    lane: WorkerLane,
    inlets: Sequence[DeviceInlet],
    plan: Crossings,
    enqueued: Iterator[int],
    has_neighbours: Callable[[], bool],
    outcome: Outcome,
    patience: Patience = ENDLESS,
) -> HalfStep[tuple[SampledToken, ...]]:
    """`run_pieces` on a KV rank, then the tokens; a chunk that is given up half-way ends on the device all the same."""
    with StepOnDevice(lane, plan.last_epoch):
        yield from run_pieces(kernels, lane, inlets, plan, enqueued, has_neighbours, patience)
        yield Wait(inlets, plan.last_epoch)
        if outcome.is_copying():
            yield Wait((outcome,), plan.last_epoch)
    return outcome.finish()


def take_graphs(model: KVModel, lane: LaneMemory) -> dict[GQASpec | MLASpec, SpanGraphs]:
    """The model's span graphs for one chunk of a lane; none while another chunk of it runs."""
    free = {shape: graphs for shape, graphs in model.spans.items() if graphs.is_free}
    for graphs in free.values():
        graphs.user = lane
    return free
