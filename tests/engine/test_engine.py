"""The engine thread: callers accept, stream, abort, add and remove models while it drives the core and a cluster."""

from __future__ import annotations

import asyncio
import gc
import threading
from dataclasses import replace

import pytest

from crosspool.cluster.base import RankLost, StepDone
from crosspool.core import FinishReason, SamplingParams
from crosspool.engine.async_engine import AsyncEngine
from crosspool.engine.engine import Engine
from crosspool.engine.expand import sequence_seed
from crosspool.engine.output import RequestOutput
from crosspool.engine.request import GenerationRequest
from crosspool.errors import (
    CapacityError,
    CheckpointError,
    ContextLengthError,
    DeadlineExceededError,
    ModelRemovedError,
    QueueFullError,
    ShuttingDownError,
    UnknownModelError,
    WorkerLostError,
)
from crosspool.models.whole_size import whole_bytes
from tests.support.awaited import soon
from tests.support.clocked_cluster import ClockedCluster
from tests.support.core_drive import a_config, a_model
from tests.support.scripted_tokens import VOCAB_SIZE, expected_tokens
from tests.support.word_tokenizer import word_tokenizer

TOKENIZER = word_tokenizer(VOCAB_SIZE)
MODELS = [replace(a_model(name, max_context=2000), tokenizer=TOKENIZER) for name in "pq"]
UNUSED_SEED = 7


class Rig:
    """An engine on a simulated cluster, with both models loaded."""

    def __init__(self, *, step_s: float = 0.0005, num_frames: int = 512, **changes: object) -> None:
        config = a_config(num_frames, **changes)
        self.cluster = ClockedCluster(MODELS, num_frames=config.num_frames, step_s=step_s)
        self.engine = Engine(config, self.cluster).start()
        self.face = AsyncEngine(self.engine)

    async def __aenter__(self) -> Rig:
        for model in MODELS:
            await self.face.add_model(model)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.face.close()
        assert self.cluster.closed
        assert not self.engine._thread.is_alive()

    def is_empty(self) -> bool:
        stats = self.engine.stats()
        return all(pool.frames_used == 0 for pool in stats.pools) and not self.engine._callers

    async def until_empty(self) -> None:
        await soon(self.is_empty, self.engine.stats)


def a_request(request_id: str = "r", model: str = "p", prompt: int = 4, max_tokens: int = 6, **more: object):
    sampling = SamplingParams(max_tokens=max_tokens, **more.pop("sampling", {}))
    return GenerationRequest(
        request_id=request_id,
        model=model,
        prompt_token_ids=tuple(range(1, prompt + 1)),
        sampling=sampling,
        **{"seed": UNUSED_SEED, **more},
    )


async def collect(stream) -> list[RequestOutput]:
    return [output async for output in stream]


def words(tokens) -> str:
    return "".join(f"w{token}" for token in tokens)


async def test_a_stream_yields_text_tokens_usage_and_times():
    async with Rig() as rig:
        outputs = await collect(rig.face.generate(a_request()))
        want = expected_tokens(UNUSED_SEED, 4, 6, ())
        assert [token for output in outputs for token in output.token_ids] == want
        assert "".join(output.text for output in outputs) == words(want)
        last = outputs[-1]
        assert last.finish_reason is FinishReason.LENGTH
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (4, 6)
        assert all(output.finish_reason is None for output in outputs[:-1])
        times = [
            last.timings.arrival_s,
            last.timings.scheduled_s,
            last.timings.first_token_s,
            last.timings.last_token_s,
        ]
        assert times == sorted(times)
        assert last.timings.ttft_s == pytest.approx(last.timings.queued_s + last.timings.prefill_s)
        assert len([moment for output in outputs for moment in output.token_times_s]) == 6
        await rig.until_empty()


async def test_overlapping_requests_of_two_models_all_end_rightly():
    async with Rig() as rig:
        requests = [
            a_request(f"r{index}", "pq"[index % 2], 1 + index % 7, 1 + index % 13, seed=index) for index in range(60)
        ]
        results = await asyncio.gather(*(collect(rig.face.generate(request)) for request in requests))
        for request, outputs in zip(requests, results, strict=True):
            want = expected_tokens(request.seed, len(request.prompt_token_ids), request.sampling.max_tokens, ())
            assert [token for output in outputs for token in output.token_ids] == want
        await rig.until_empty()


async def test_n_sequences_have_their_own_repeatable_seeds():
    async with Rig() as rig:
        first = await collect(rig.face.generate(a_request("a", n=3)))
        again = await collect(rig.face.generate(a_request("b", n=3)))
        for index in range(3):
            want = expected_tokens(sequence_seed(UNUSED_SEED, index), 4, 6, ())
            for outputs in (first, again):
                assert [t for o in outputs if o.index == index for t in o.token_ids] == want
        assert sequence_seed(UNUSED_SEED, 0) == UNUSED_SEED
        drawn = [await collect(rig.face.generate(a_request(f"c{i}", seed=None, max_tokens=20))) for i in range(2)]
        assert drawn[0][-1].usage == drawn[1][-1].usage
        assert [o.token_ids for o in drawn[0]] != [o.token_ids for o in drawn[1]]


async def test_end_tokens_of_the_model_stop_unless_ignored_and_have_no_text():
    tokens = expected_tokens(UNUSED_SEED, 4, 6, ())
    eos = tokens[2]
    model = replace(a_model("e", eos=[eos, 63]), tokenizer=TOKENIZER)
    async with Rig() as rig:
        rig.cluster.sim.models["e"] = model
        await rig.face.add_model(model)
        stop_at = tokens.index(eos) + 1
        outputs = await collect(rig.face.generate(a_request(model="e")))
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert outputs[-1].stop_reason == eos
        assert outputs[-1].usage.completion_tokens == stop_at
        assert "".join(o.text for o in outputs) == words(tokens[: stop_at - 1])
        ignored = await collect(rig.face.generate(a_request("i", model="e", sampling={"ignore_eos": True})))
        assert ignored[-1].usage.completion_tokens == 6
        kept = await collect(rig.face.generate(a_request("k", model="e", include_stop_str_in_output=True)))
        assert "".join(o.text for o in kept) == words(tokens[:stop_at])


async def test_a_stop_string_across_tokens_ends_the_sequence_and_frees_it():
    tokens = expected_tokens(UNUSED_SEED, 4, 8, ())
    text = words(tokens)
    stop = words(tokens[2:4])[1:-1]
    async with Rig() as rig:
        request = a_request(max_tokens=500, stop=("zzz", stop))
        outputs = await collect(rig.face.generate(request))
        assert "".join(o.text for o in outputs) == text[: text.index(stop)]
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert outputs[-1].stop_reason == stop
        assert outputs[-1].usage.completion_tokens == 4
        assert [t for o in outputs for t in o.token_ids] == tokens[:4]
        await rig.until_empty()
        assert rig.engine.stats().models[0].generated_tokens == 4  # the step after it was never run


async def test_refusals_come_at_once_and_leave_nothing_behind():
    async with Rig(max_queue=2, max_num_seqs=1, step_s=0.02) as rig:
        with pytest.raises(UnknownModelError, match="p, q"):
            rig.face.generate(a_request(model="nope"))
        with pytest.raises(ValueError, match=f"{VOCAB_SIZE}; p has ids 0 to {VOCAB_SIZE - 1}"):
            rig.face.generate(replace(a_request(), prompt_token_ids=(1, VOCAB_SIZE)))
        with pytest.raises(ValueError, match="logit_bias"):
            rig.face.generate(a_request(sampling={"logit_bias": ((99999999, -3.0),)}))
        with pytest.raises(ContextLengthError, match="2001"):
            rig.face.generate(a_request(prompt=1, max_tokens=2000))
        streams = [rig.face.generate(a_request(f"r{index}", max_tokens=40)) for index in range(3)]
        with pytest.raises(ValueError, match="'r0' is already running"):
            rig.face.generate(a_request("r0"))
        with pytest.raises(QueueFullError) as full:
            rig.face.generate(a_request("r9"))
        assert full.value.retry_after_s >= 1
        for stream in streams:
            await stream.aclose()
        await rig.until_empty()
        rig.face.generate(a_request("r9"))


async def test_a_client_that_leaves_frees_its_pages():
    async with Rig(step_s=0.002) as rig:
        stream = rig.face.generate(a_request("closed", max_tokens=1500))
        await anext(stream)
        await stream.aclose()
        await rig.until_empty()

        async for _ in rig.face.generate(a_request("broken off", max_tokens=1500)):
            break
        gc.collect()
        await rig.until_empty()

        task = asyncio.create_task(collect(rig.face.generate(a_request("cancelled", max_tokens=1500))))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await rig.until_empty()

        async with rig.face.generate(a_request("left", max_tokens=1500)) as left:
            await anext(left)
        await rig.until_empty()
        assert rig.engine.stats().models[0].num_finished["abort"] == 4
        assert len(asyncio.all_tasks()) == 1


async def test_an_abort_from_another_thread_ends_the_stream_with_abort():
    async with Rig(step_s=0.002) as rig:
        stream = rig.face.generate(a_request(max_tokens=1500, n=2))
        threading.Timer(0.03, lambda: rig.engine.abort("r")).start()
        outputs = await collect(stream)
        assert {o.index for o in outputs if o.finish_reason is FinishReason.ABORT} == {0, 1}
        assert not rig.face.abort("r")


async def test_a_queued_request_is_dropped_at_its_deadline():
    async with Rig(step_s=0.02, max_num_seqs=1) as rig:
        first = rig.face.generate(a_request("first", max_tokens=20))
        outputs = await collect(rig.face.generate(a_request("late", timeout_s=0.05)))
        assert len(outputs) == 1
        assert isinstance(outputs[0].error, DeadlineExceededError)
        assert (await collect(first))[-1].finish_reason is FinishReason.LENGTH


async def test_streams_go_on_after_ranks_are_lost_with_the_very_same_tokens():
    async with Rig(step_s=0.002) as rig:
        requests = [a_request(f"r{index}", "pq"[index % 2], max_tokens=100, seed=index) for index in range(6)]
        tasks = [asyncio.create_task(collect(rig.face.generate(request))) for request in requests]
        for rank in ("w0", "kv0", "w0"):
            await asyncio.sleep(0.05)
            rig.cluster.lose(rank, back_in_s=0.03)
        for request, outputs in zip(requests, await asyncio.gather(*tasks), strict=True):
            assert [t for o in outputs for t in o.token_ids] == expected_tokens(request.seed, 4, 100, ())
        await soon(lambda: rig.engine.stats().num_ranks_lost == 3, rig.engine.stats)
        await rig.until_empty()


async def test_a_rank_that_does_not_come_back_ends_its_requests_with_an_error():
    async with Rig(step_s=0.002, recovery_timeout_s=0.1) as rig:
        stream = rig.face.generate(a_request(max_tokens=1000))
        await anext(stream)
        rig.cluster.lose("w0", back_in_s=None)
        outputs = await collect(stream)
        assert isinstance(outputs[-1].error, WorkerLostError)
        assert "w0" in str(outputs[-1].error)
        with pytest.raises(WorkerLostError, match="w0"):
            rig.face.generate(a_request("next"))
        await rig.until_empty()


async def test_while_a_rank_is_down_the_cluster_is_told_which_models_are_wanted_most():
    async with Rig(step_s=0.002) as rig:
        rig.cluster.lose("w0", back_in_s=None)
        streams = [rig.face.generate(a_request(f"r{index}", name)) for index, name in enumerate("pqq")]
        async with asyncio.timeout(60):
            while rig.cluster.first != ["q", "p"]:
                await asyncio.sleep(0.005)
        for index in range(3):
            rig.face.abort(f"r{index}")
        for stream in streams:
            await collect(stream)
        await rig.until_empty()


async def test_models_come_and_go_while_others_serve():
    async with Rig() as rig:
        assert [(info.name, info.state, info.loaded_bytes) for info in rig.face.models()] == [
            ("p", "ready", 120),
            ("q", "ready", 120),
        ]
        with pytest.raises(ValueError, match="already ready"):
            await rig.face.add_model(MODELS[0])
        busy = asyncio.create_task(collect(rig.face.generate(a_request("busy", "p", max_tokens=300))))
        other = asyncio.create_task(collect(rig.face.generate(a_request("other", "q", max_tokens=300))))
        with rig.cluster.held():
            await asyncio.sleep(0)  # both are accepted
            removal = asyncio.create_task(rig.face.remove_model("p"))
            await asyncio.sleep(0.01)
            assert not removal.done()
            with pytest.raises(ModelRemovedError):
                rig.face.generate(a_request("late", "p"))
        await removal
        assert (await busy)[-1].usage.completion_tokens == 300
        assert rig.cluster.removed == ["p"]
        with pytest.raises(UnknownModelError):
            rig.face.model("p")
        await rig.face.add_model(MODELS[0])
        cut = asyncio.create_task(collect(rig.face.generate(a_request("cut", "p", max_tokens=1500))))
        await asyncio.sleep(0.02)
        await rig.face.remove_model("p", drain=False)
        assert isinstance((await cut)[-1].error, ModelRemovedError)
        assert (await other)[-1].usage.completion_tokens == 300


@pytest.mark.parametrize("drain", [True, False])
async def test_ranks_forget_a_models_sequences_before_the_model(drain: bool):
    """Mapped pages with users would wait for every step that runs then, also of lanes that wait for these frames."""
    async with Rig() as rig:
        other = asyncio.create_task(collect(rig.face.generate(a_request("other", "q", max_tokens=300))))
        last = rig.face.generate(a_request("last", "p", max_tokens=30))
        await anext(last)
        await rig.face.remove_model("p", drain=drain)
        await asyncio.gather(other, collect(last))
        assert rig.cluster.let_go[:2] == [2, "p"]


async def test_a_model_that_does_not_load_says_so_and_can_be_tried_again():
    async with Rig() as rig:
        broken = replace(a_model("b"), tokenizer=TOKENIZER)
        rig.cluster.sim.models["b"] = broken
        rig.cluster.broken["b"] = "b/model.safetensors: cut short"
        with pytest.raises(CheckpointError, match="cut short"):
            await rig.face.add_model(broken)
        assert rig.face.model("b").state == "failed"
        with pytest.raises(UnknownModelError, match="cut short"):
            rig.face.generate(a_request(model="b"))
        rig.cluster.loses_ranks = {"b"}
        with pytest.raises(WorkerLostError, match="cut short"):
            await rig.face.add_model(broken)
        del rig.cluster.broken["b"]
        assert (await rig.face.add_model(broken)).state == "ready"
        assert len(await collect(rig.face.generate(a_request(model="b")))) == 6


async def test_close_drains_within_its_bound_and_ends_the_rest_with_an_error():
    rig = await Rig().__aenter__()
    running = asyncio.create_task(collect(rig.face.generate(a_request("running", max_tokens=3))))
    with rig.cluster.held():
        await asyncio.sleep(0)
        closing = asyncio.create_task(rig.face.close(drain_s=60.0))
        await soon(lambda: rig.engine._closing)
        with pytest.raises(ShuttingDownError):
            rig.face.generate(a_request("late"))
        await asyncio.sleep(0.05)
        assert not closing.done()
    await closing
    assert (await running)[-1].finish_reason is FinishReason.LENGTH

    rig = await Rig().__aenter__()
    running = asyncio.create_task(collect(rig.face.generate(a_request("running", max_tokens=3))))
    with rig.cluster.held():
        await asyncio.sleep(0)
        await rig.face.close(drain_s=0.05)
        assert isinstance((await running)[-1].error, ShuttingDownError)
    await rig.face.close()


async def test_a_failing_engine_thread_leaves_nobody_waiting():
    async with Rig(step_s=0.005) as rig:
        stream = rig.face.generate(a_request(max_tokens=1000))
        await anext(stream)
        rig.cluster.submit = None  # a bug
        outputs = await collect(stream)
        assert isinstance(outputs[-1].error, WorkerLostError)
        with pytest.raises(WorkerLostError, match="the engine failed"):
            rig.face.generate(a_request("next"))
        async with asyncio.timeout(5):
            with pytest.raises(WorkerLostError, match="the engine failed"):
                await rig.face.remove_model("p")


async def test_outputs_of_the_step_in_which_the_engine_fails_are_still_told():
    async with Rig(step_s=0.001) as rig:
        real = rig.engine._core.schedule

        def failing(now: float):
            if rig.engine._core.live_models["p"].num_finished[FinishReason.LENGTH]:
                raise RuntimeError("a bug")
            return real(now)

        rig.engine._core.schedule = failing
        long = rig.face.generate(a_request("long", "q", max_tokens=1000))
        outputs = await asyncio.wait_for(collect(rig.face.generate(a_request("short"))), timeout=5)
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert "a bug" in str((await collect(long))[-1].error)


async def test_a_tokenizer_that_raises_ends_only_its_own_request():
    async with Rig(step_s=0.001) as rig:
        good = asyncio.create_task(collect(rig.face.generate(a_request("good", max_tokens=40))))

        def broken(token_id: int):
            raise ValueError("Invalid prefix encountered")

        with rig.cluster.held():
            bad = rig.face.generate(a_request("bad", max_tokens=40))
            [number] = rig.engine._callers.sequences_of("bad")
            rig.engine._callers._by_sequence[number].builder._detokenizer.feed = broken
        outputs = await collect(bad)
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert "Invalid prefix" in str(outputs[-1].error)
        assert (await good)[-1].usage.completion_tokens == 40
        await rig.until_empty()


async def test_a_stop_string_and_a_lost_rank_at_the_same_moment_are_one_end():
    tokens = expected_tokens(UNUSED_SEED, 4, 8, ())
    async with Rig(recovery_timeout_s=0.0) as rig:
        real = rig.cluster.poll
        num_tokens = 0

        def together(timeout_s: float):
            nonlocal num_tokens
            events = real(timeout_s)
            num_tokens += sum(isinstance(event, StepDone) for event in events)
            if num_tokens >= 3:
                num_tokens = -1000
                events = [*events, RankLost(rank="w0", reason="killed")]
            return events

        rig.cluster.poll = together
        outputs = await collect(rig.face.generate(a_request(max_tokens=500, stop=(words(tokens[:3]),))))
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert sum(output.finish_reason is not None for output in outputs) == 1
        await rig.until_empty()


async def test_an_idle_engine_sleeps():
    async with Rig() as rig:
        await collect(rig.face.generate(a_request()))
        await rig.until_empty()
        await asyncio.sleep(0.05)
        before = rig.cluster.num_polls
        await asyncio.sleep(0.3)
        assert rig.cluster.num_polls - before <= 1


async def test_a_sink_that_raises_ends_only_its_own_request():
    async with Rig(step_s=0.002) as rig:

        def broken(output: RequestOutput) -> None:
            raise KeyError("a caller's bug")

        rig.engine.submit(a_request("broken", max_tokens=1500), broken)
        assert len(await collect(rig.face.generate(a_request("good")))) == 6
        await rig.until_empty()


async def test_a_model_that_a_prefill_ranks_host_has_no_room_for_is_refused_before_it_is_loaded():
    rig = Rig(prefill_ranks=("p0",), prefill_host_bytes=whole_bytes(MODELS[0].spec))
    async with rig:
        later = [replace(a_model(name, max_context=2000), prefill_ranks=("p0",)) for name in "rs"]
        loading = rig.engine.add_model(later[0])
        with pytest.raises(CapacityError, match=r"^s takes .* of host memory on each prefill rank, beside .* of r, "):
            rig.engine.add_model(later[1])
        assert "s" not in {info.name for info in rig.engine.models()}
        assert loading is not None
