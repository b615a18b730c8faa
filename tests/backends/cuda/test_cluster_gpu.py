"""The CUDA workers as processes of a cluster: tokens as of an undivided model, and after a rank is killed.

A GPU for each rank where there are enough; else processes share one and take turns on it.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.channels.nvshmem import find_library  # noqa: E402
from crosspool.backends.cuda.device.launch import DeviceKernels  # noqa: E402
from crosspool.cluster.base import (  # noqa: E402
    ModelFailed,
    ModelPlacement,
    ModelReady,
    RankFailed,
    RankLost,
    RankReady,
    StepDone,
    StepFailed,
    StepTokens,
)
from crosspool.cluster.config import ClusterConfig  # noqa: E402
from crosspool.cluster.start import start_cluster  # noqa: E402
from crosspool.core import SamplingParams  # noqa: E402
from crosspool.kv_pool.geometry import page_geometry  # noqa: E402
from crosspool.models.directory import read_model_dir  # noqa: E402
from crosspool.scheduler.step import NewSequence, StepDescriptor, StepHeader, StepRow  # noqa: E402
from tests.backends.cuda.decoding import FRAME_BYTES, build_decoder  # noqa: E402
from tests.support.tiny_models import write_tiny_model  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_GPUS = torch.cuda.device_count()

PAGE_TOKENS = 16
NUM_FRAMES = 512


@dataclass
class Lane:
    """One lane that decodes one prompt greedily, in runs of `run_length` steps."""

    number: int
    name: str
    directory: object
    prompt: list[int]
    num_tokens: int
    first_frame: int
    tokens: list[int] = field(default_factory=list)
    step_seq: int = 0
    is_known: bool = False
    replays: int = 0
    run_length: int = 1

    def step(self) -> StepDescriptor:
        self.step_seq += 1
        known = [*self.prompt, *self.tokens]
        joins = not self.is_known
        count = len(known) if joins else 1
        geometry = page_geometry(
            self.directory.spec, page_tokens=PAGE_TOKENS, frame_bytes=FRAME_BYTES, kv_dtype="bfloat16"
        )
        width = geometry.frames_per_page
        pages = tuple(
            tuple(range(self.first_frame + idx * width, self.first_frame + (idx + 1) * width)) for idx in range(8)
        )
        header = StepHeader(
            lane=self.number,
            model=self.name,
            step_seq=self.step_seq,
            phase="prefill" if joins else "decode",
            num_tokens=count,
            num_steps=1 if joins else min(self.run_length, self.num_tokens - len(self.tokens)),
        )
        row = StepRow(
            sequence_id=self.number,
            token_ids=tuple(known) if joins else None,
            num_cached_tokens=0 if joins else len(known) - 1,
            num_new_tokens=count,
            new_pages=pages if joins else (),
        )
        new = NewSequence(
            sequence_id=self.number,
            prompt_token_ids=tuple(self.prompt),
            output_token_ids=tuple(self.tokens),
            sampling=SamplingParams(max_tokens=64, temperature=0.0),
        )
        return StepDescriptor(header=header, rows=(row,), joining=(new,) if joins else ())


def placement(directory, name, ranks):
    return ModelPlacement(
        name=name,
        directory=directory.path,
        hidden_size=directory.spec.hidden_size,
        kv_rank="kv0",
        weights_ranks=ranks,
        page_tokens=PAGE_TOKENS,
        frame_bytes=FRAME_BYTES,
        kv_dtype="bfloat16",
    )


def drive(cluster, lanes, kill_after=None, limit_s=120.0):
    """Run the lanes to their end; `kill_after`: (tokens of the first lane, rank) to kill a rank once."""
    until_s, away, waiting, seen = time.monotonic() + limit_s, set(), {lane.number for lane in lanes}, []
    by_number, busy = {lane.number: lane for lane in lanes}, set()
    while busy or any(len(lane.tokens) < lane.num_tokens for lane in lanes):
        assert time.monotonic() < until_s, f"lanes do not end; last events {seen[-6:]}"
        if not away:
            for number in sorted(waiting):
                cluster.submit(by_number[number].step())
            busy |= waiting
            waiting.clear()
        for event in cluster.poll(0.5):
            seen.append(event)
            match event:
                case StepDone(result=result):
                    lane = by_number[result.lane]
                    lane.tokens += [token.token_id for token in result.sampled]
                    lane.is_known = True
                    busy.discard(lane.number)
                    if len(lane.tokens) < lane.num_tokens:
                        waiting.add(lane.number)
                case StepTokens(lane=number, sampled=sampled):
                    by_number[number].tokens += [token.token_id for token in sampled]
                case StepFailed(lane=number, fatal=fatal, error=error):
                    assert not fatal, error
                    by_number[number].replays += 1
                    busy.discard(number)
                    waiting.add(number)
                case RankLost(rank=rank):
                    away.add(rank)
                case RankReady(rank=rank):
                    away.discard(rank)
                case ModelFailed(error=error) | RankFailed(error=error):
                    pytest.fail(error)
            if kill_after and len(lanes[0].tokens) >= kill_after[0]:
                os.kill(cluster.pids()[kill_after[1]], signal.SIGKILL)
                kill_after = None
    return seen


def start(num_weights, directories, control="graphs", transport="auto"):
    """A process for each rank, on GPUs in turn."""
    ranks = tuple(f"w{idx}" for idx in range(num_weights))
    cluster = start_cluster(
        ClusterConfig(
            backend="cuda",
            control=control,
            transport=transport,
            token=secrets.token_hex(16),
            weights_ranks=ranks,
            devices=tuple((rank, idx % NUM_GPUS) for idx, rank in enumerate(("kv0", *ranks))),
            num_frames=NUM_FRAMES,
            frame_bytes=FRAME_BYTES,
            max_tokens_per_step=128,
            num_lanes=2,
            run_lanes=2,
            spin_us=200_000,
            start_timeout_s=120.0,
            step_deadline_s=5.0,
        )
    )
    for name, directory in directories.items():
        cluster.add_model(placement(directory, name, ranks))
    ready, until_s = 0, time.monotonic() + 150
    while ready < len(directories):
        assert time.monotonic() < until_s, "models are not ready"
        for event in cluster.poll(0.5):
            assert not isinstance(event, ModelFailed | RankFailed), event
            ready += isinstance(event, ModelReady)
    return cluster


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    return {
        family: read_model_dir(write_tiny_model(path / family, family, dtype="bfloat16", tokenizer=False))
        for family in ("qwen3_moe", "deepseek_v2")
    }


@cache
def undivided(path, num_slices):
    """The model's decoder on GPU 0, with room for one sequence."""
    kernels = DeviceKernels(torch.device("cuda", 0))
    return build_decoder(
        kernels, read_model_dir(path), 1, 128, kernels.device, num_slices=num_slices, page_tokens=PAGE_TOKENS
    )


def expected_tokens(directory, prompt, count, num_slices):
    """Greedy tokens of the undivided model."""
    decoder, tokens = undivided(directory.path, num_slices), list(prompt)
    half = decoder.attention
    for position in range(len(prompt) + count - 1):
        half.token_ids.fill_(tokens[position])
        half.positions.fill_(position)
        half.lengths.fill_(position + 1)
        logits = decoder.step()
        if position >= len(prompt) - 1:
            tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]


def lanes_for(directories, num_tokens, run_length=1, before=()):
    """before: lanes of the same numbers, which have ended; their numbers of steps go on."""
    lanes, first = [], 1
    for number, (family, directory) in enumerate(directories.items()):
        prompt = np.random.default_rng(number).integers(1, directory.spec.vocab_size, size=40).tolist()
        lane = Lane(number, family, directory, prompt, num_tokens, first, run_length=run_length)
        lane.step_seq = before[number].step_seq if number < len(before) else 0
        lanes.append(lane)
        first += 200
    return lanes


def report_speed(seen, label):
    done = [event.result for event in seen if isinstance(event, StepDone)]
    busy = sorted(result.attention_s for result in done[len(done) // 2 :])
    print(f"{label}: {len(done)} steps, host busy a step p50 {busy[len(busy) // 2] * 1e6:.0f} us")


@pytest.mark.parametrize(("control", "run_lengths"), [("host", (1,)), ("graphs", (1, 6)), ("resident", (1, 6))])
def test_two_models_in_two_lanes_give_the_undivided_models_tokens(control, run_lengths, directories):
    num_weights = max(1, min(2, NUM_GPUS - 1))
    cluster = start(num_weights, directories, control)
    lanes: list[Lane] = []
    try:
        for run_length in run_lengths:
            lanes = lanes_for(directories, 24, run_length, before=lanes)
            report_speed(drive(cluster, lanes), f"two lanes, {control}, runs of {run_length}")
            for lane in lanes:
                assert lane.tokens == expected_tokens(lane.directory, lane.prompt, 24, num_weights), lane.name
                assert lane.replays == 0
            cluster.forget("kv0", [lane.number for lane in lanes])
        print(cluster.memory_bytes())
    finally:
        cluster.close()


def has_nvshmem():
    if NUM_GPUS < 2:
        return pytest.mark.skip(reason="NVSHMEM wants a GPU for each rank; this machine has one")
    return pytest.mark.skipif(not find_library().is_absolute(), reason="nvidia-nvshmem-cu13 is not installed")


@pytest.mark.parametrize("transport", ["host", "peer", pytest.param("nvshmem", marks=has_nvshmem())])
def test_tokens_are_the_same_by_every_transport(transport, directories):
    cluster = start(1, directories, transport=transport)
    try:
        lanes = lanes_for(directories, 16)
        report_speed(drive(cluster, lanes), f"two lanes, transport {transport}")
    finally:
        cluster.close()
    for lane in lanes:
        assert lane.tokens == expected_tokens(lane.directory, lane.prompt, 16, 1), lane.name
        assert lane.replays == 0


@has_nvshmem()
def test_a_killed_rank_of_a_team_is_given_up_with_the_reason(directories):
    cluster = start(1, directories, transport="nvshmem")
    try:
        os.kill(cluster.pids()["w0"], signal.SIGKILL)
        failed, until_s = [], time.monotonic() + 60
        while not failed and time.monotonic() < until_s:
            failed = [event.error for event in cluster.poll(0.5) if isinstance(event, RankFailed)]
        assert "NVSHMEM takes no rank back into its team" in failed[0]
    finally:
        cluster.close()


@pytest.mark.parametrize("control", ["graphs", "resident"])
@pytest.mark.parametrize("rank", ["w0", "kv0"])
def test_a_killed_rank_rejoins_and_tokens_are_those_of_an_undisturbed_run(rank, control, directories):
    cluster = start(1, directories, control)
    lanes: list[Lane] = []
    try:
        forget_on_loss(cluster, lambda: lanes, rank)
        for run_length in (1, 6):
            lanes = lanes_for(directories, 24, run_length, before=lanes)
            if rank == "kv0":
                lanes = lanes[:1]
            begin_s = time.monotonic()
            seen = drive(cluster, lanes, kill_after=(8, rank))
            print(f"{rank} killed, {control}, runs of {run_length}: {time.monotonic() - begin_s:.1f} s")
            assert any(isinstance(event, RankLost) for event in seen)
            for lane in lanes:
                assert lane.tokens == expected_tokens(lane.directory, lane.prompt, 24, 1), lane.name
            cluster.forget("kv0", [lane.number for lane in lanes])
    finally:
        cluster.close()


def forget_on_loss(cluster, lanes, rank):
    """A lost KV rank takes its sequences along: they join anew, with the tokens they have."""
    if rank != "kv0":
        return
    poll = cluster.poll

    def watched(timeout_s):
        events = poll(timeout_s)
        for event in events:
            if isinstance(event, RankLost):
                for lane in lanes():
                    lane.is_known = False
        return events

    cluster.poll = watched
