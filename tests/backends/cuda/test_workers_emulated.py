"""The CUDA workers on the CPU, through real steps: against the NumPy workers, token for token."""

from __future__ import annotations

import ctypes
import time
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from crosspool.backends.base import LaneLinks  # noqa: E402
from crosspool.backends.cuda.channels.link import Site  # noqa: E402
from crosspool.backends.cuda.chunks import chunk_plan  # noqa: E402
from crosspool.backends.cuda.device.driver import Driver  # noqa: E402
from crosspool.backends.cuda.kv_frames.frames import ArenaFrames, DeviceFrames  # noqa: E402
from crosspool.backends.cuda.kv_frames.host_frames import HostFrames  # noqa: E402
from crosspool.backends.cuda.kv_rank.kv_worker import CudaAttentionWorker  # noqa: E402
from crosspool.backends.cuda.steps.lane_memory import WaitRule  # noqa: E402
from crosspool.backends.cuda.steps.passes import passes  # noqa: E402
from crosspool.backends.cuda.weights_rank.ffn_worker import CudaFFNWorker  # noqa: E402
from crosspool.backends.numpy.host_vmm import HostVmmDriver  # noqa: E402
from crosspool.cluster.base import ModelPlacement  # noqa: E402
from crosspool.cluster.channel import link_bytes  # noqa: E402
from crosspool.cluster.loading import LoadCancelledError  # noqa: E402
from crosspool.cluster.region import ArrayRegion  # noqa: E402
from crosspool.core import SamplingParams  # noqa: E402
from crosspool.kv_pool.ahead import MappingHint  # noqa: E402
from crosspool.kv_pool.backing.mapped_frames import MappedFrames  # noqa: E402
from crosspool.kv_pool.geometry import page_geometry  # noqa: E402
from crosspool.kv_pool.host_tier import FrameCopy  # noqa: E402
from crosspool.models.directory import read_model_dir  # noqa: E402
from crosspool.scheduler.step import NewSequence, StepDescriptor, StepHeader, StepRow  # noqa: E402
from tests.backends.cuda.decoding import FRAME_BYTES  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402
from tests.backends.cuda.lazy_engine import LazyEngine  # noqa: E402
from tests.support.half_turns import take_turns  # noqa: E402
from tests.support.tiny_models import write_tiny_model  # noqa: E402

pytestmark = [pytest.mark.judge, pytest.mark.triton]

CPU = torch.device("cpu")
PAGE_TOKENS = 8
NUM_FRAMES = 64


class Pair:
    """One KV worker and some FFN workers in one thread; links are opened as a cluster opens them."""

    def __init__(
        self,
        directory,
        num_weights: int = 1,
        max_tokens: int = 64,
        shares=(),
        frames=None,
        route="ffn",
        num_gpus=9,
        host_frames=None,
    ) -> None:
        ranks = tuple(f"w{idx}" for idx in range(num_weights))
        devices = {rank: idx % num_gpus for idx, rank in enumerate(("kv0", *ranks))}
        kernels, rule = EmulatedKernels(), WaitRule()
        self.kernels = kernels
        spec = directory.spec
        self.name = "tiny"
        self.placement = ModelPlacement(
            name=self.name,
            directory=directory.path,
            hidden_size=spec.hidden_size,
            kv_rank="kv0",
            weights_ranks=ranks,
            page_tokens=PAGE_TOKENS,
            frame_bytes=FRAME_BYTES,
            kv_dtype="bfloat16",
            weights_shares=shares,
            route=route,
        )
        own = frames or arena()
        self.kv = CudaAttentionWorker(site("kv0", devices), kernels, rule, own, host_frames=host_frames)
        self.ffn = {rank: CudaFFNWorker(site(rank, devices), kernels, rule) for rank in ranks}
        self.inlets, self.outlets, self.ends = {}, {}, {}
        capacity = spec.hidden_size * max_tokens
        for rank, worker in self.ffn.items():
            region = ArrayRegion(link_bytes(capacity)).map()
            self.outlets[rank], self.inlets[rank] = self.kv.open_link(0, rank, region, capacity, lambda: None)
            self.ends[rank] = worker.open_link(0, "kv0", region, capacity, lambda: None)
            worker.add_model(self.placement, lambda loaded, total: None)
        self.kv.add_model(self.placement, lambda loaded, total: None)

    def run(self, step: StepDescriptor, max_segments: int | None = None):
        halves = {"kv0": self.kv.run(step, LaneLinks(self.outlets, self.inlets))}
        for rank, worker in self.ffn.items():
            outlet, inlet = self.ends[rank]
            halves[rank] = worker.run(step.header, LaneLinks({"kv0": outlet}, {"kv0": inlet}))
        result, self.told = take_turns(halves, "kv0", max_segments=max_segments)
        return result


def arena():
    return ArenaFrames(torch.zeros((NUM_FRAMES, FRAME_BYTES), dtype=torch.uint8))


def site(rank, devices):
    return Site(rank, CPU, Driver(rank), devices, None)


def pages(directory, count, first=1):
    width = page_geometry(
        directory.spec, page_tokens=PAGE_TOKENS, frame_bytes=FRAME_BYTES, kv_dtype="bfloat16"
    ).frames_per_page
    return tuple(tuple(range(first + idx * width, first + (idx + 1) * width)) for idx in range(count))


def prefill_step(directory, prompt, step_seq, sampling, sequence_id=1, first_frame=1, num_pages=8):
    header = StepHeader(lane=0, model="tiny", step_seq=step_seq, phase="prefill", num_tokens=len(prompt))
    row = StepRow(
        sequence_id=sequence_id,
        token_ids=tuple(prompt),
        num_cached_tokens=0,
        num_new_tokens=len(prompt),
        new_pages=pages(directory, num_pages, first_frame),
    )
    new = NewSequence(sequence_id=sequence_id, prompt_token_ids=tuple(prompt), output_token_ids=(), sampling=sampling)
    return StepDescriptor(header=header, rows=(row,), joining=(new,))


def decode_step(cached, step_seq):
    header = StepHeader(lane=0, model="tiny", step_seq=step_seq, phase="decode", num_tokens=len(cached))
    rows = tuple(
        StepRow(sequence_id=key, token_ids=None, num_cached_tokens=value, num_new_tokens=1)
        for key, value in cached.items()
    )
    return StepDescriptor(header=header, rows=rows)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "tiny"
    return read_model_dir(write_tiny_model(path, "qwen3_moe", dtype="bfloat16", tokenizer=False))


def greedy(max_tokens=8, **options):
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **options)


def prompt_of(directory, length, seed=0):
    return np.random.default_rng(seed).integers(1, directory.spec.vocab_size, size=length).tolist()


def generate(pair, directory, prompt, count, sampling):
    (token,) = pair.run(prefill_step(directory, prompt, 1, sampling))
    tokens = [token.token_id]
    for idx in range(count - 1):
        (token,) = pair.run(decode_step({1: len(prompt) + idx}, idx + 2))
        tokens.append(token.token_id)
    return tokens


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
        worker_lane.memory._cursor = int(worker_lane.memory.words[2])
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
        return replace(step, header=replace(step.header, lane=1))

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


@pytest.mark.parametrize("options", [{}, {"shares": (3.0, 1.0), "num_gpus": 2}], ids=["equal", "one beside the KV"])
def test_a_chunk_in_pieces_gives_the_tokens_of_passes(directory, monkeypatch, options):
    """A prompt in one chunk of several pieces, its rest in a second one, on two weights ranks; then decode."""
    monkeypatch.setattr(chunk_plan, "PIECE_TOKENS", 16)
    prompt = prompt_of(directory, 80)
    found = []
    for limit in (32, 10**9):  # in pieces, and in passes
        monkeypatch.setattr(chunk_plan, "PASS_TOKENS", limit)
        pair = Pair(directory, 2, **options)
        whole = prefill_step(directory, prompt, 1, greedy(), num_pages=12)
        (row,) = whole.rows
        row = replace(row, token_ids=tuple(prompt[:44]), num_new_tokens=44, sample=False)
        pair.run(replace(whole, header=replace(whole.header, num_tokens=44), rows=(row,)))
        for inlet in pair.inlets.values() if limit == 32 else ():  # what passes take for words with epochs
            assert not any(ctypes.string_at(inlet.link.inbox.slot(0), 8 * 8 * directory.spec.hidden_size))
        header = StepHeader(lane=0, model="tiny", step_seq=2, phase="prefill", num_tokens=36)
        row = StepRow(sequence_id=1, token_ids=tuple(prompt[44:]), num_cached_tokens=44, num_new_tokens=36)
        (first,) = pair.run(StepDescriptor(header=header, rows=(row,)))
        (second,) = pair.run(decode_step({1: 80}, 3))
        found.append([first.token_id, second.token_id])
    assert found[0] == found[1]


def test_decode_is_fused_but_for_the_time_of_a_prompt(directory, monkeypatch):
    prompt = prompt_of(directory, 5)
    pair = Pair(directory)
    worker = pair.ffn["w0"]
    expected = generate(Pair(directory), directory, prompt, 3, greedy())
    worker._turns.may_fuse = True
    assert generate(pair, directory, prompt, 3, greedy()) == expected
    assert "moe_fused" in [kernel for kernel, _, _ in pair.kernels.launches]
    assert not worker._turns.fused_lanes

    region = ArrayRegion(link_bytes(directory.spec.hidden_size * 64)).map()
    outlet, inlet = worker.open_link(1, "kv0", region, directory.spec.hidden_size * 64, lambda: None)
    pair.kv.open_link(1, "w0", region, directory.spec.hidden_size * 64, lambda: None)
    worker._turns.fused_lanes.add(0)  # as if a fused pass were under way
    monkeypatch.setattr(chunk_plan, "PASS_TOKENS", 32)
    header = StepHeader(lane=1, model="tiny", step_seq=1, phase="prefill", num_tokens=40)
    chunk = worker.run(header, LaneLinks({"kv0": outlet}, {"kv0": inlet}))
    assert next(chunk).satisfied()  # its lane is idle and its link open
    before = next(chunk)
    assert not before.satisfied()
    assert worker._turns.chunk_lanes == {1}
    worker._turns.end(0)
    assert before.satisfied()
    chunk.close()
    assert not worker._turns.chunk_lanes


def test_a_sequence_may_begin_behind_pages_that_another_one_filled(directory):
    """The prefix cache: two full pages are the other's, the step starts at their end, and both go on rightly."""
    first = prompt_of(directory, 21)
    second = [*first[:16], *prompt_of(directory, 5, seed=1)]
    expected = {1: generate(Pair(directory), directory, first, 3, greedy())}
    expected[2] = generate(Pair(directory), directory, second, 3, greedy())
    pair = Pair(directory)
    found = {1: [pair.run(prefill_step(directory, first, 1, greedy(), num_pages=4))[0].token_id]}
    width = len(pages(directory, 1)[0])
    whole = prefill_step(directory, second, 2, greedy(), 2)
    shared = (*pages(directory, 2), *pages(directory, 2, first=1 + 4 * width))
    row = replace(whole.rows[0], token_ids=tuple(second[16:]), num_cached_tokens=16, num_new_tokens=5, new_pages=shared)
    step = replace(whole, header=replace(whole.header, num_tokens=5), rows=(row,))
    found[2] = [pair.run(step)[0].token_id]
    for turn in range(2):
        for token in pair.run(decode_step(dict.fromkeys(found, 21 + turn), turn + 3)):
            found[token.sequence_id].append(token.token_id)
    assert found == expected


@pytest.mark.parametrize("segments", [1, 2, 9])
def test_a_chunk_that_was_given_up_half_way_can_be_replayed(directory, segments):
    """Its lane is free again on both ranks, though not all of its kernels were enqueued."""
    prompt = prompt_of(directory, 40)
    (expected,) = Pair(directory).run(prefill_step(directory, prompt, 1, greedy()))
    pair = Pair(directory)
    assert pair.run(prefill_step(directory, prompt, 1, greedy()), max_segments=segments) is None
    for worker_lane in (pair.kv._lanes[0], pair.ffn["w0"]._lanes[0]):
        assert worker_lane.memory.is_drained
    (found,) = pair.run(prefill_step(directory, prompt, 2, greedy()))
    assert found.token_id == expected.token_id


class Mapped:
    """A pair on frames that are mapped for each model."""

    def __init__(self, directory) -> None:
        self.mapped = MappedFrames(HostVmmDriver(), NUM_FRAMES, FRAME_BYTES, 4096)
        self.frames = DeviceFrames(self.mapped, FRAME_BYTES, CPU)
        self.pair = Pair(directory, frames=self.frames)


def test_mapped_frames_give_the_tokens_of_an_arena(directory):
    """Also once pages lie where others lay before."""
    prompts = [prompt_of(directory, 21, seed) for seed in range(2)]
    expected = [generate(Pair(directory), directory, prompt, 4, greedy()) for prompt in prompts]
    mapped = Mapped(directory)
    assert generate(mapped.pair, directory, prompts[0], 4, greedy()) == expected[0]
    held = mapped.frames.counts().mapped_frames
    mapped.pair.kv.forget([1])
    mapped.frames.hint([MappingHint(model="tiny", given_back=pages(directory, 8))])
    assert wait_for(lambda: mapped.frames.counts().mapped_frames == 0)
    step = prefill_step(directory, prompts[1], 5, greedy(), 2)
    (row,) = step.rows
    flipped = tuple(reversed(row.new_pages))
    found = [mapped.pair.run(replace(step, rows=(replace(row, new_pages=flipped),)))[0].token_id]
    for idx in range(3):
        found += [token.token_id for token in mapped.pair.run(decode_step({2: 21 + idx}, idx + 6))]
    assert found == expected[1]
    counts = mapped.frames.counts()
    assert counts.unmaps == 8
    assert counts.mapped_frames == held
    mapped.pair.kv.remove_model("tiny")
    mapped.mapped.close()


def test_pages_of_a_step_that_was_given_up_stay_until_its_lane_is_drained(directory):
    prompt = prompt_of(directory, 5)
    mapped = Mapped(directory)
    mapped.pair.run(prefill_step(directory, prompt, 1, greedy(), num_pages=1))
    held = mapped.frames.counts().mapped_frames
    assert mapped.pair.run(decode_step({1: len(prompt)}, 2), max_segments=5) is None
    mapped.pair.kv.forget([1])
    mapped.frames.hint([MappingHint(model="tiny", given_back=pages(directory, 1))])
    time.sleep(0.05)
    assert mapped.frames.counts().mapped_frames == held
    for worker_lane in (mapped.pair.kv._lanes[0], mapped.pair.ffn["w0"]._lanes[0]):
        worker_lane.memory._last_epoch = 0  # now the device has ended it
    mapped.frames.hint([])
    assert wait_for(lambda: mapped.frames.counts().mapped_frames == 0)
    mapped.pair.kv.remove_model("tiny")
    mapped.mapped.close()


def wait_for(condition, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()


def test_frames_that_cannot_be_mapped_name_the_size():
    with pytest.raises(ValueError, match="frame_bytes is 6000; with kv_backing vmm it must be a multiple of 4096"):
        MappedFrames(HostVmmDriver(), 4, 6000, 4096)


def test_a_sequence_may_begin_behind_pages_that_were_in_host_memory(directory):
    """Others had their frames meanwhile. A step that brings the new ones begins once they are filled."""
    prompt, width = prompt_of(directory, 21), len(pages(directory, 1)[0])
    expected = generate(Pair(directory), directory, prompt, 3, greedy())
    frames, inwards, outwards = arena(), LazyEngine(), LazyEngine()
    host = np.zeros((NUM_FRAMES, FRAME_BYTES), dtype=np.uint8)
    tier = HostFrames(frames.arena, host, host.ctypes.data, NUM_FRAMES, 0, (inwards, outwards))
    pair = Pair(directory, frames=frames, host_frames=tier)
    assert pair.kv.memory_bytes()["host_kv_cache"] == NUM_FRAMES * FRAME_BYTES
    pair.run(prefill_step(directory, prompt, 1, greedy(), num_pages=4))
    tier.copy([FrameCopy(page, page, is_stowed=True) for page in pages(directory, 2)])
    pair.kv.forget([1])
    other = prefill_step(directory, prompt_of(directory, 21, seed=1), 2, greedy(), 2, num_pages=4)
    assert not begun(pair, other).satisfied(), "its frames are being read"
    outwards.go_on()
    pair.run(other)

    new = pages(directory, 2, first=1 + 4 * width)
    moves = zip(new, pages(directory, 2), strict=True)
    tier.copy([FrameCopy(page, stowed, is_stowed=False) for page, stowed in moves])
    (token,) = pair.run(decode_step({2: 21}, 3))
    assert token.sequence_id == 2, "a step that brings other frames, or none, waits for nothing"
    whole = prefill_step(directory, prompt, 4, greedy(), 3)
    brought = (*new, *pages(directory, 2, first=1 + 6 * width))
    row = replace(
        whole.rows[0], token_ids=tuple(prompt[16:]), num_cached_tokens=16, num_new_tokens=5, new_pages=brought
    )
    step = replace(whole, header=replace(whole.header, num_tokens=5), rows=(row,))
    assert not begun(pair, step).satisfied(), "its pages are not filled yet"
    inwards.go_on()
    found = [pair.run(step)[0].token_id]
    for turn in range(2):
        found += [token.token_id for token in pair.run(decode_step({3: 21 + turn}, turn + 5))]
    assert found == expected


def begun(pair, step):
    """What the KV rank's half of a step waits for first; it is given up then."""
    half = pair.kv.run(step, LaneLinks(pair.outlets, pair.inlets))
    wait = next(half)
    half.close()
    return wait


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
