"""A decode or prefill step on a weights rank: its passes are launched, or posted to the resident server."""

from crosspool.backends.base import HalfStep, Wait
from crosspool.backends.cuda.channels.link import DeviceInlet
from crosspool.backends.cuda.steps.passes import passes
from crosspool.backends.cuda.steps.step_end import await_end
from crosspool.backends.cuda.steps.step_on_device import StepOnDevice
from crosspool.backends.cuda.weights_rank.ffn_passes import FFNPasses, FFNPassKind, FFNWay
from crosspool.backends.cuda.weights_rank.fused_turns import FusedTurns
from crosspool.backends.cuda.weights_rank.resident_ffn import ResidentFFN
from crosspool.scheduler.step import StepHeader


def run_step(
    found: FFNPasses,
    resident: ResidentFFN | None,
    turns: FusedTurns,
    header: StepHeader,
    way: FFNWay,
    inlet: DeviceInlet,
    *,
    is_ahead: bool = False,
) -> HalfStep[None]:
    """One step, and a wait for its end. inlet: of the way's link. is_ahead: as on the KV rank."""
    lane, model = way.lane, way.model
    plan = passes(header.num_tokens, header.step_seq, model.spec.num_layers)
    last_epoch = plan[-1].base + model.spec.num_layers
    with StepOnDevice(lane, last_epoch, is_ahead=is_ahead) as on_device:
        try:
            server = resident if resident is not None and resident.can_serve(lane) else None
            if resident is not None and server is None:
                resident.before_launch(lane)
            is_fused = server is None and turns.take(header.lane)
            for part in plan:
                if server is not None:
                    server.post(way, part.bucket, part.base)
                    continue
                kind = FFNPassKind(part.bucket, is_fused)
                source = found.find(way, kind)
                lane.memory.push(part.base, model.spec.num_layers)
                if lane.stream is not None:
                    yield from lane.run_pass(way.model_name, way.links, kind, (inlet,), part.base)
                    continue
                for layer in source.kernels():
                    yield Wait((inlet,), part.base + layer + 1)
            if is_ahead:
                yield from on_device.await_turn()
            lane.memory.nears_end = True
            yield from await_end(lane, header, (inlet,), last_epoch)
        finally:
            turns.end(header.lane)
