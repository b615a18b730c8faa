"""A run of repeated steps leaves the core as the steps one by one do."""

from __future__ import annotations

import pytest

from crosspool.cluster.base import StepDone
from crosspool.core import Request, SampledToken, SamplingParams
from crosspool.engine.engine_core import EngineCore
from crosspool.engine.repeat import num_repeats, repeat_step
from crosspool.scheduler.step import StepResult
from tests.support.core_drive import a_config, a_model

TOKEN = 0


def add(core: EngineCore, model: str, prompt: int, output: int, now: float = 0.0) -> None:
    request = Request(
        request_id=f"{model}/{prompt}",
        model=model,
        prompt_token_ids=[5] * prompt,
        sampling=SamplingParams(max_tokens=output),
        arrival_s=now,
    )
    core.add_requests([request], now)


def end(core: EngineCore, lane: int, now: float) -> None:
    step = core.dispatcher.lanes[lane].step
    sampled = tuple(SampledToken(row.sequence_id, TOKEN) for row in step.rows if row.sample)
    core.on_event(StepDone(result=StepResult(lane=lane, step_seq=step.header.step_seq, sampled=sampled)), now)


def ready_core(models=("a", "b"), prompts=(8, 12), output=40, **config) -> EngineCore:
    """Every model decodes in a lane of its own, all prompts done."""
    core = EngineCore(a_config(num_frames=256, **config))
    for name in models:
        core.add_model(a_model(name, page_tokens=32))
        for prompt in prompts:
            add(core, name, prompt, output)
    core.schedule(0.0)
    while any(live.prefilling or len(live.decoding) != len(prompts) for live in core.live_models.values()):
        for lane in core.dispatcher.lanes:
            if lane.step is not None:
                end(core, lane.index, 1.0)
        core.schedule(1.0)
    for lane in core.dispatcher.lanes:  # until every lane has the whole batch
        if lane.step is not None:
            end(core, lane.index, 1.0)
    core.schedule(1.0)
    return core


def state(core: EngineCore) -> tuple:
    sequences = [
        (s.sequence_id, s.state, s.num_cached_tokens, list(s.request.output_token_ids), s.in_step, len(s.table.pages))
        for live in core.live_models.values()
        for s in live.unended()
    ]
    lanes = [
        (lane.step, lane.present and lane.present.started_s, [s.sequence_id for s in lane.sequences])
        for lane in core.dispatcher.lanes
    ]
    turns = [core.dispatcher._turns["decode"].ready(set(core.live_models))]
    return core.stats(2.0), sequences, lanes, turns


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_repeat_equals_the_steps_one_by_one(share):
    slow, fast = ready_core(), ready_core()
    assert state(slow) == state(fast)
    for lane in (0, 1):
        most = num_repeats(fast, lane)
        assert most > 2
        count = max(1, round(share * (most - 1)))
        for number in range(count):
            end(slow, lane, 1.0 + 0.01 * (number + 1))
            steps = slow.schedule(1.0 + 0.01 * (number + 1))
            assert [step.header.lane for step in steps] == [lane]
        repeat_step(fast, lane, count, TOKEN, 1.0 + 0.01 * count)
    assert state(slow) == state(fast)


def test_after_its_repeats_a_step_ends_in_the_ordinary_way_and_both_cores_go_on_alike():
    slow, fast = ready_core(output=37), ready_core(output=37)
    count = num_repeats(fast, 0) - 1
    for _ in range(count):
        end(slow, 0, 1.5)
        slow.schedule(1.5)
    repeat_step(fast, 0, count, TOKEN, 1.5)
    for core in (slow, fast):
        for _ in range(60):
            for lane in core.dispatcher.lanes:
                if lane.step is not None:
                    end(core, lane.index, 2.0)
            core.schedule(2.0)
        assert not core._sequences
    assert state(slow) == state(fast)


def test_no_repeat_reaches_past_a_page_or_an_end():
    core = ready_core(models=("a",), prompts=(8,), output=40)
    sequence = core.dispatcher.lanes[0].sequences[0]
    slots = 32 * len(sequence.table.pages) - sequence.num_cached_tokens
    left = 40 - len(sequence.request.output_token_ids)
    assert num_repeats(core, 0) == min(slots, left)
    short = ready_core(models=("a",), prompts=(8,), output=6)
    assert num_repeats(short, 0) == 6 - len(short.dispatcher.lanes[0].sequences[0].request.output_token_ids)


def test_models_that_share_a_lane_take_turns_step_by_step():
    core = ready_core(models=("a", "b", "c"))
    assert [num_repeats(core, lane) for lane in (0, 1)] == [1, 1]


def test_a_sequence_that_joins_ends_the_repeats():
    core = ready_core(models=("a",))
    assert num_repeats(core, 0) > 1
    add(core, "a", 9, 5, 1.0)
    core.schedule(1.0)
    assert num_repeats(core, 0) > 1  # still in prefill
    prefill = next(lane.index for lane in core.dispatcher.lanes if lane.phase == "prefill")
    end(core, prefill, 1.1)
    assert num_repeats(core, 0) == 1
    with pytest.raises(AssertionError):
        repeat_step(core, 0, 1, TOKEN, 1.2)


def test_a_lower_lane_that_is_idle_takes_the_next_step():
    core = ready_core(models=("a", "b"), output=12)
    short = core.dispatcher.lanes[0].step.header.model
    while core.live_models[short].decoding:
        end(core, 0, 1.5)
        core.schedule(1.5)
    assert core.dispatcher.lanes[0].step is None
    assert num_repeats(core, 1) == 1
