"""A step on the KV rank that leads it: pass by pass, then the tokens of rows that are sampled."""

from collections.abc import Sequence

from crosspool.backends.base import HalfStep, IntArray, Wait
from crosspool.backends.cuda.channels.link import DeviceInlet
from crosspool.backends.cuda.device.streams import on_stream
from crosspool.backends.cuda.kernels.sampling import fill_sampling, sampling_records
from crosspool.backends.cuda.kv_rank.kv_pass import KVPass
from crosspool.backends.cuda.kv_rank.kv_passes import KVPasses, KVPassKind, KVWay
from crosspool.backends.cuda.steps.batch import Batch
from crosspool.backends.cuda.steps.lane import WorkerLane
from crosspool.backends.cuda.steps.outcome import Outcome
from crosspool.backends.cuda.steps.passes import Pass, passes
from crosspool.backends.cuda.steps.step_end import await_end
from crosspool.backends.cuda.steps.step_on_device import StepOnDevice
from crosspool.core import SampledToken
from crosspool.scheduler.step import StepHeader


def run_step(
    found: KVPasses,
    header: StepHeader,
    way: KVWay,
    inlets: Sequence[DeviceInlet],
    batch: Batch,
    idx: int = 0,
    *,
    is_ahead: bool = False,
) -> HalfStep[tuple[SampledToken, ...]]:
    """One step, number `idx` of its run. inlets: of the way's links.

    is_ahead: the step before it has not ended here.
    """
    num_layers, lane = way.model.spec.num_layers, way.lane
    plan = passes(header.num_tokens, header.step_seq, num_layers, idx)
    last_epoch = plan[-1].base + num_layers
    outcome = Outcome(batch, lane)
    with StepOnDevice(lane, last_epoch, is_ahead=is_ahead) as on_device:
        for part in plan:
            sampled = batch.sampled_in(part.start, part.stop)
            is_decode = batch.num_rows_of(part.start, part.stop) == part.num_tokens
            kind = KVPassKind(part.bucket, bool(sampled) or is_decode, is_decode)  # those of decode all sample
            source = found.find(way, kind)
            slot = _push(lane, source, batch, part, num_layers)
            if lane.stream is not None:
                yield from lane.run_pass(way.model_name, way.links, kind, inlets, part.base)
            else:
                for layer in source.kernels():
                    peers = inlets[: way.num_weights_ranks] if layer >= 0 else inlets[way.num_weights_ranks :]
                    yield Wait(peers, part.base + max(layer, ~layer) + 1)
            outcome.expect(part, slot, sampled, source.rows.half.logits_out)
        if is_ahead:
            yield from on_device.await_turn()
        lane.memory.nears_end = True
        yield from await_end(lane, header, inlets, last_epoch)
        if outcome.is_copying():
            yield Wait((outcome,), last_epoch)
    return outcome.finish()


def _push(lane: WorkerLane, source: KVPass, batch: Batch, part: Pass, num_layers: int) -> int:
    """Upload what changed and push the pass's record; rows that are not in use repeat the first."""
    token_ids, positions = part.padded(batch.token_ids), part.padded(batch.positions)
    sampling = None
    for row in batch.drawn:
        if part.start <= row.token < part.stop:
            sampling = sampling_records(part.bucket) if sampling is None else sampling
            fill_sampling(sampling, row.token - part.start, batch.sampling_row(row))
    set_tables(lane, source, [batch.tables[row] for row in part.padded(batch.row_of_token)], positions)
    return lane.memory.push(part.base, num_layers, part.bucket, token_ids, positions, sampling)


def set_tables(lane: WorkerLane, source: KVPass, tables: list[IntArray], positions: Sequence[int]) -> None:
    """Upload the block tables of a pass's rows where they changed."""
    if not source.rows.are_set(tables):
        with on_stream(lane.stream):
            source.rows.set(tables, positions)
