"""A run of decode steps on the KV rank that leads them: by the device alone, or step by step by the host."""

from collections.abc import Mapping
from collections.abc import Sequence as ListOf

from crosspool.backends.base import HalfStep, Wait
from crosspool.backends.cuda.channels.link import OPEN_EPOCH, DeviceInlet
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.device.streams import on_stream
from crosspool.backends.cuda.kernels.advance import release
from crosspool.backends.cuda.kv_rank.kv_passes import KVPasses, KVPassKind, KVWay
from crosspool.backends.cuda.kv_rank.kv_step import run_step, set_tables
from crosspool.backends.cuda.steps.batch import Batch
from crosspool.backends.cuda.steps.decode_run import push_run, read_run
from crosspool.backends.cuda.steps.passes import bucket_of
from crosspool.backends.cuda.steps.step_on_device import StepOnDevice
from crosspool.backends.sequences.sequence import Sequence
from crosspool.core import SampledToken
from crosspool.scheduler.step import StepDescriptor, epoch, run_over


def run_by_device(
    found: KVPasses,
    step: StepDescriptor,
    way: KVWay,
    inlets: ListOf[DeviceInlet],
    batch: Batch,
    *,
    is_ahead: bool = False,
) -> HalfStep[tuple[SampledToken, ...]]:
    """A run by one graph, its tokens read behind (`decode_run.py`). is_ahead: the step before it has not ended here."""
    header, model, lane = step.header, way.model, way.lane
    num_layers, kind = model.spec.num_layers, KVPassKind(bucket_of(header.num_tokens), True, True)
    source = found.find(way, kind)
    rows = kind.row_numbers(header.num_tokens)
    set_tables(lane, source, [batch.tables[row] for row in rows], [batch.positions[row] for row in rows])
    last_epoch = epoch(header.step_seq, header.num_steps * num_layers - 1)
    with StepOnDevice(lane, last_epoch, is_ahead=is_ahead) as on_device:
        slots = push_run(lane.memory, batch, header, num_layers, kind.bucket, model.geometry.page_tokens)
        lane.run_loop(way.model_name, way.links, kind)
        if is_ahead:
            yield from on_device.await_turn()
        return (yield from read_run(lane.memory, batch, step, slots, num_layers, inlets, on_device.follows))


def run_by_host(
    found: KVPasses,
    kernels: Launcher,
    step: StepDescriptor,
    way: KVWay,
    inlets: ListOf[DeviceInlet],
    batch: Batch,
    sequences: Mapping[int, Sequence],
) -> HalfStep[tuple[SampledToken, ...]]:
    """A run step by step: rows that the host samples, and kernels without a device. batch: the rows of its first."""
    ended: set[int] = set()
    for idx in range(step.num_steps):
        if idx:
            batch = Batch(step.part(idx), sequences, way.model.geometry.page_tokens)
        sampled = yield from run_step(found, step.header, way, inlets, batch, idx)
        ended |= batch.ended(dict(enumerate(sampled)))
        left = step.num_steps - 1 - idx
        if left and len(ended) == len(batch.rows):
            batch.end_run(left)
            flags = [] if way.joined is not None else [link.map().outbox.flag for link in way.links]
            over = run_over(step.header.step_seq, step.num_steps, way.model.spec.num_layers)
            with on_stream(way.lane.stream):
                release(kernels, flags, over)
            break
        if left:
            yield Wait((), OPEN_EPOCH, (sampled,))
    return sampled
