"""The home's side of a chunk that a prefill rank computes: gives earlier KV, takes the new, samples at the end.

It alone writes its pages, so that a prefill rank that comes late or was given up harms nobody.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from crosspool.backends.base import HalfStep, Wait
from crosspool.backends.cuda.channels.link import OPEN_EPOCH, DeviceInlet
from crosspool.backends.cuda.chunks.chunk_half import head_logits
from crosspool.backends.cuda.chunks.chunk_rows import ChunkRows, frame_tables
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.device.uploads import upload_all
from crosspool.backends.cuda.kernels.norm import residual_norm
from crosspool.backends.cuda.kv_frames.cache import PagedCache
from crosspool.backends.cuda.kv_rank.kv_chunk import sample_rows
from crosspool.backends.cuda.kv_rank.kv_chunk_run import run_to_end
from crosspool.backends.cuda.kv_rank.kv_models import KVModel
from crosspool.backends.cuda.prefill_rank.handed_plan import CROSSINGS_AHEAD, HandedPlan, handed_plan
from crosspool.backends.cuda.prefill_rank.handed_slots import HandedCrossing, SlotPlaces, earlier_places
from crosspool.backends.cuda.steps.batch import Batch
from crosspool.backends.cuda.steps.lane import WorkerLane
from crosspool.backends.cuda.steps.outcome import Outcome
from crosspool.core import SampledToken
from crosspool.scheduler.step import StepHeader


def run_handed(
    kernels: Launcher,
    header: StepHeader,
    model: KVModel,
    lane: WorkerLane,
    inlet: DeviceInlet,
    batch: Batch,
    has_neighbours: Callable[[], bool],
) -> HalfStep[tuple[SampledToken, ...]]:
    """Lead the step; its tokens. inlet: of the link with the prefill rank; has_neighbours: of `run_pieces`."""
    yield Wait((lane.idle, inlet), OPEN_EPOCH)
    link = inlet.link.map()
    cached = [row.num_cached_tokens for row in batch.rows]
    most = 4 * link.inbox.capacity // model.geometry.token_layer_bytes
    plan = handed_plan(header.num_tokens, sum(cached), header.step_seq, model.spec.num_layers, most)
    outcome = Outcome(batch, lane)
    enqueued = _home(kernels, model, HandedCrossing(kernels, lane.memory, link), plan, batch, cached, outcome)
    return (yield from run_to_end(kernels, lane, (inlet,), plan, enqueued, has_neighbours, outcome))


def _home(
    kernels: Launcher,
    model: KVModel,
    crossing: HandedCrossing,
    plan: HandedPlan,
    batch: Batch,
    cached: list[int],
    outcome: Outcome,
) -> Iterator[int]:
    """Enqueue the home's kernels on torch's current stream; yields each crossing's number before its wait."""
    rows = ChunkRows.of(batch)
    own = (rows.row_of_token.astype(np.int32), rows.positions.astype(np.int32))
    tables, *places = upload_all([frame_tables(rows), *own, *earlier_places(cached)], model.frames.device)
    cache = PagedCache(frames=model.frames, frame_table=tables, geometry=model.geometry)
    new, earlier = SlotPlaces(*places[:2]), SlotPlaces(*places[2:])

    def give(number: int) -> None:
        if number == plan.last:
            crossing.tell(number)
            return
        layer, part = plan.place(number)
        crossing.give_slots(number, cache, layer, earlier.part(*plan.parts[part]))

    for number in range(min(CROSSINGS_AHEAD, plan.num_crossings)):
        give(number)
    for number in range(plan.last):
        yield number
        crossing.wait(number)
        layer, part = plan.place(number)
        if part == len(plan.parts) - 1:
            crossing.take_slots(number, cache, layer, new)
        if number + CROSSINGS_AHEAD <= plan.last:
            give(number + CROSSINGS_AHEAD)
    yield plan.last
    crossing.wait(plan.last)
    if batch.sampled:
        normed = _normed(kernels, model, crossing, plan.last, len(batch.sampled))
        sample_rows(kernels, head_logits(kernels, model.weights.head, normed), batch, outcome)


def _normed(kernels: Launcher, model: KVModel, crossing: HandedCrossing, number: int, count: int) -> torch.Tensor:
    """(rows, hidden) bf16: what the head takes of the rows that came last."""
    hidden, device = model.spec.hidden_size, model.frames.device
    residual = torch.zeros(count, hidden, dtype=torch.float32, device=device)
    normed = torch.empty(count, hidden, dtype=torch.bfloat16, device=device)
    residual_norm(
        kernels,
        residual,
        model.weights.final_norm,
        normed,
        eps=model.spec.norm_eps,
        partials=[crossing.link.inbox.rows(number, count, hidden, torch.float32)],
        overlap=False,
    )
    return normed
