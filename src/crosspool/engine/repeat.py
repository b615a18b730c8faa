"""Runs of like decode steps as one event: what a simulation of days skips over without skipping a decision.

While every decoding model has its own lane, a lane's next step has the same rows as its present one, until a sequence
ends, needs a page, or joins. `num_repeats` says for how many steps that holds; `repeat_step` leaves the core as if
that many had been handed out and ended one after the other (tests/engine/test_repeat.py compares both).
"""

from dataclasses import replace

from crosspool.engine.engine_core import EngineCore
from crosspool.engine.sequence import SequenceState
from crosspool.engine.step_start import decode_row
from crosspool.scheduler.step import StepResult


def num_repeats(core: EngineCore, lane: int) -> int:
    """How many steps in a row, the one in flight included, have the rows of the lane's present step. At least 1.

    After that many, or after any other event, the step in flight has to be ended in the ordinary way. Sequences may
    end earlier by a token the caller samples; it bounds the number itself.
    """
    lanes = core.dispatcher.lanes
    running = lanes[lane]
    assert running.step is not None, f"lane {lane} is idle"
    assert running.queued is None, f"lane {lane} has its next step already; it cannot be repeated"
    if running.phase != "decode" or core.dispatcher.parked_steps.steps:
        return 1
    if any(other.step is None for other in lanes[:lane] if other.phase == "decode"):
        return 1  # the next step would take that lane
    carried = {other.step.header.model for other in lanes if other.step is not None and other.phase == "decode"}
    if any(live.decoding and name not in carried for name, live in core.live_models.items()):
        return 1  # another model's turn comes next
    live = core.live_models[running.step.header.model]
    if len(live.decoding) != len(running.sequences):
        return 1
    count = 1 << 62
    for sequence in running.sequences:
        if sequence.state is not SequenceState.DECODING:
            return 1
        request = sequence.request
        if request.constraint is not None:
            return 1  # its next row allows other tokens
        slots = len(sequence.table.pages) * sequence.table.page_tokens - sequence.num_cached_tokens
        left = request.sampling.max_tokens - len(request.output_token_ids)
        count = min(count, slots, left)
    return max(1, count)


def repeat_step(core: EngineCore, lane: int, count: int, token_id: int, now: float) -> None:
    """The lane's decode step ended and was handed out again `count` times, the last time at `now`.

    Each time every row sampled `token_id`, which ends no sequence. `count` is less than `num_repeats`. The log of
    steps holds them as one.
    """
    assert 0 < count < num_repeats(core, lane), f"lane {lane} cannot repeat its step {count} times"
    running = core.dispatcher.lanes[lane]
    flight = running.present
    assert flight is not None
    step = flight.step
    live = core.live_models[step.header.model]
    for sequence in running.sequences:
        sequence.num_cached_tokens += count
        sequence.num_losses = 0
        sequence.request.output_token_ids.extend([token_id] * count)
    live.generated_tokens += count * len(running.sequences)
    result = StepResult(lane=lane, step_seq=running.step_seq, sampled=())
    core.log.add(step.header, flight.started_s, now, result, count)
    core.dispatcher.take_turn(live.model.name, "decode")
    running.step_seq += count
    flight.started_s = now
    header = step.header._replace(step_seq=running.step_seq)
    flight.step = replace(step, header=header, rows=tuple(map(decode_row, running.sequences)), joining=())
