"""The CUDA workers on the CPU, through real steps: against the NumPy workers, token for token."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from crosspool.backends.base import LaneLinks  # noqa: E402
from crosspool.backends.cuda.steps.passes import passes  # noqa: E402
from crosspool.cluster.loading import LoadCancelledError  # noqa: E402
from crosspool.core import SamplingParams  # noqa: E402
from crosspool.scheduler.step import StepDescriptor, StepHeader, StepRow  # noqa: E402
from tests.backends.cuda.worker_pair import Pair, decode_step, generate, greedy, pages, prefill_step, prompt_of  # noqa: E402

pytestmark = [pytest.mark.judge, pytest.mark.triton]


def test_a_prompt_of_several_passes_gives_the_same_tokens_as_one_run_token_by_token(directory):
    prompt = prompt_of(directory, 37)
    whole = generate(Pair(directory), directory, prompt, 3, greedy())
    other, tokens = Pair(directory), []
    for step_seq, token in enumerate(prompt, start=1):
        if step_seq == 1:
            step = prefill_step(directory, [token], 1, greedy())
        else:
            header = StepHeader(lane=0, model="tiny", step_seq=step_seq, phase="prefill", num_tokens=1)
            row = StepRow(sequence_id=1, token_ids=(token,), num_cached_tokens=step_seq - 1, num_new_tokens=1)
            step = StepDescriptor(header=header, rows=(row,))
        (sampled,) = other.run(step)
    tokens = [sampled.token_id]
    assert tokens == whole[:1]


def test_two_weights_ranks_give_the_tokens_of_one(directory):
    prompt = prompt_of(directory, 5)
    one, two = (generate(Pair(directory, count), directory, prompt, 4, greedy()) for count in (1, 2))
    assert one == two


def test_the_kv_rank_may_choose_the_experts(directory):
    prompt = prompt_of(directory, 5)
    pair = Pair(directory, 2, route="kv")
    assert generate(pair, directory, prompt, 4, greedy()) == generate(Pair(directory), directory, prompt, 4, greedy())
    kernels = [kernel for kernel, _, _ in pair.kernels.launches]
    assert "route_put" in kernels
    assert "route" not in kernels


def test_a_rank_may_take_a_smaller_share(directory):
    prompt = prompt_of(directory, 5)
    pair = Pair(directory, 2, shares=(2.0, 1.0))
    assert generate(pair, directory, prompt, 4, greedy()) == generate(Pair(directory), directory, prompt, 4, greedy())
    held = [worker.memory_bytes()["ffn_weights"] for worker in pair.ffn.values()]
    assert held[1] < 0.7 * held[0]


def test_rows_that_are_not_in_use_change_nothing(directory):
    """Three sequences on kernels of four rows give what each gives alone."""
    prompts = [prompt_of(directory, 4 + idx, seed=idx) for idx in range(3)]
    pair, seq = Pair(directory), 0
    together = {}
    width = len(pages(directory, 1)[0])
    for idx, prompt in enumerate(prompts):
        seq += 1
        step = prefill_step(directory, prompt, seq, greedy(), idx, 1 + idx * 2 * width, num_pages=2)
        together[idx] = [pair.run(step)[0].token_id]
    for turn in range(3):
        seq += 1
        cached = {idx: len(prompt) + turn for idx, prompt in enumerate(prompts)}
        for token in pair.run(decode_step(cached, seq)):
            together[token.sequence_id].append(token.token_id)
    for idx, prompt in enumerate(prompts):
        assert generate(Pair(directory), directory, prompt, 4, greedy()) == together[idx]


def test_a_step_that_was_given_up_can_be_replayed(directory):
    prompt = prompt_of(directory, 5)
    expected = generate(Pair(directory), directory, prompt, 2, greedy())
    pair = Pair(directory)
    (first,) = pair.run(prefill_step(directory, prompt, 1, greedy()))
    assert pair.run(decode_step({1: len(prompt)}, 2), max_segments=5) is None
    for worker_lane in (pair.kv._lanes[0], pair.ffn["w0"]._lanes[0]):
        worker_lane.memory._last_epoch = 0  # emulated kernels of a step that was given up never end
        worker_lane.memory.records.num_written = int(worker_lane.memory.words[2])
    (second,) = pair.run(decode_step({1: len(prompt)}, 3))
    assert [first.token_id, second.token_id] == expected


def test_a_step_that_brings_pages_waits_for_one_that_was_given_up_and_still_runs(directory):
    """The pages may be those of the one that was given up, whose kernels write to them."""
    prompt, pair = prompt_of(directory, 5), Pair(directory)
    pair.run(prefill_step(directory, prompt, 1, greedy()))
    assert pair.run(decode_step({1: len(prompt)}, 2), max_segments=5) is None
    left = pair.kv._lanes[0].memory
    assert not left.is_drained
    pair.kv.forget([1])

    def in_other_lane(step):
        return replace(step, header=step.header._replace(lane=1))

    half = pair.kv.run(
        in_other_lane(prefill_step(directory, prompt, 1, greedy(), 2)), LaneLinks(pair.outlets, pair.inlets)
    )
    wait = next(half)
    assert not wait.satisfied()
    assert not pair.kv.may_begin_ahead(in_other_lane(decode_step({2: len(prompt)}, 2)))
    left._last_epoch = 0  # now the device has ended it
    assert wait.satisfied()
    half.close()
    assert pair.kv._given_up.have_ended, "nothing of the second one was on the device"


def test_the_host_samples_what_is_more_than_the_best_token(directory):
    prompt = prompt_of(directory, 5)
    (token,) = Pair(directory).run(prefill_step(directory, prompt, 1, greedy(num_logprobs=3)))
    assert token.token_id == token.top_logprobs[0].token_id
    assert token.logprob == token.top_logprobs[0].logprob
    plain = SamplingParams(max_tokens=4, temperature=1.0, seed=5)
    hosted = SamplingParams(max_tokens=4, temperature=1.0, seed=5, num_logprobs=0)
    by_device, by_host = (generate(Pair(directory), directory, prompt, 4, params) for params in (plain, hosted))
    assert by_device == by_host


def test_wrong_steps_are_named(directory):
    pair = Pair(directory)
    with pytest.raises(ValueError, match="not known here"):
        pair.run(decode_step({9: 3}, 1))
    with pytest.raises(ValueError, match="lower max_num_batched_tokens"):
        passes(20000, 1, directory.spec.num_layers)
    wrong = pair.placement.__class__(**{**placement_fields(pair.placement), "kv_dtype": "float32"})
    with pytest.raises(ValueError, match="bfloat16"):
        pair.kv.add_model(wrong, lambda loaded, total: None)


def placement_fields(placement):
    return {name: getattr(placement, name) for name in placement.__slots__}


def test_a_load_that_is_given_up_while_passes_are_captured_leaves_no_weights(directory, monkeypatch):
    pair = Pair(directory)
    worker = pair.ffn["w0"]
    held = worker.memory_bytes()

    def given_up(placement, progress):
        assert worker.has("other")
        raise LoadCancelledError("the load of other was given up")

    monkeypatch.setattr(worker, "_prepare", given_up)
    with pytest.raises(LoadCancelledError):
        worker.add_model(replace(pair.placement, name="other"), lambda loaded, total: None)
    assert not worker.has("other")
    assert worker.memory_bytes() == held
