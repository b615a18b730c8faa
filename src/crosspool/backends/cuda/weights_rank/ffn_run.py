"""A run of decode steps on a weights rank: one graph, or passes posted to the server; the KV rank may end it early."""

from crosspool.backends.base import HalfStep, Wait
from crosspool.backends.cuda.channels.link import DeviceInlet
from crosspool.backends.cuda.steps.decode_run import places, read_end
from crosspool.backends.cuda.steps.passes import bucket_of
from crosspool.backends.cuda.steps.records import RunPlace
from crosspool.backends.cuda.steps.step_on_device import StepOnDevice
from crosspool.backends.cuda.weights_rank.ffn_passes import FFNPass, FFNPasses, FFNPassKind, FFNWay
from crosspool.backends.cuda.weights_rank.resident_ffn import ResidentFFN
from crosspool.scheduler.step import StepHeader, epoch, run_over


def run_several(
    found: FFNPasses,
    resident: ResidentFFN | None,
    header: StepHeader,
    way: FFNWay,
    inlet: DeviceInlet,
    *,
    is_ahead: bool = False,
) -> HalfStep[None]:
    """All steps of the run, and a wait for its end. inlet: of the way's link. is_ahead: as on the KV rank."""
    lane, model = way.lane, way.model
    num_layers, bucket = model.spec.num_layers, bucket_of(header.num_tokens)
    last_epoch = epoch(header.step_seq, header.num_steps * num_layers - 1)
    with StepOnDevice(lane, last_epoch, is_ahead=is_ahead) as on_device:
        if resident is not None and resident.can_serve(lane):
            over = run_over(header.step_seq, header.num_steps, num_layers)
            resident.post(
                way,
                bucket,
                epoch(header.step_seq, 0) - 1,
                place=RunPlace(over, 0, header.num_steps - 1, may_be_first=lane.goes_ahead),
                num_steps=header.num_steps,
            )
        else:
            if resident is not None:
                resident.before_launch(lane)
            # Not fused: a prompt would have to wait for the whole run, and within a graph that repeats itself a
            # cooperative kernel has not been tried on a GPU.
            kind = FFNPassKind(bucket, False)
            steps = places(header, num_layers, may_be_first=lane.goes_ahead)
            source = found.find(way, kind)
            if lane.stream is None:
                yield from _run_emulated(source, steps, way, inlet)
            else:
                for base, place in steps:
                    lane.memory.push(base, num_layers, place=place)
                lane.run_loop(way.model_name, way.links, kind)
        if is_ahead:
            yield from on_device.await_turn()
        yield from read_end(lane.memory, header, num_layers, inlet, on_device.follows)


def _run_emulated(
    source: FFNPass, steps: list[tuple[int, RunPlace]], way: FFNWay, inlet: DeviceInlet
) -> HalfStep[None]:
    """Kernels without a device, which run in turn: the loop looks itself whether more rows come."""
    for base, place in steps:
        if place.step:
            yield Wait((inlet,), base + 1)
            if inlet.arrived(place.over):
                return
        way.lane.memory.push(base, way.model.spec.num_layers)
        for layer in source.kernels():
            yield Wait((inlet,), base + layer + 1)
