"""A KV worker and some FFN workers of the CUDA backend in one thread on the CPU, and steps for them."""

from __future__ import annotations

import numpy as np
import torch

from crosspool.backends.base import LaneLinks, NewLink
from crosspool.backends.cuda.channels.link import Site
from crosspool.backends.cuda.device.driver import Driver
from crosspool.backends.cuda.kv_frames.frames import ArenaFrames
from crosspool.backends.cuda.kv_rank.kv_worker import CudaAttentionWorker
from crosspool.backends.cuda.steps.lane_memory import WaitRule
from crosspool.backends.cuda.weights_rank.ffn_worker import CudaFFNWorker
from crosspool.cluster.base import ModelPlacement
from crosspool.cluster.channel import link_bytes
from crosspool.cluster.region import ArrayRegion
from crosspool.core import SamplingParams
from crosspool.kv_pool.geometry import page_geometry
from crosspool.scheduler.step import NewSequence, StepDescriptor, StepHeader, StepRow
from tests.backends.cuda.decoding import FRAME_BYTES
from tests.backends.cuda.emulated import EmulatedKernels
from tests.support.half_turns import take_turns

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
            self.outlets[rank], self.inlets[rank] = self.kv.open_link(NewLink(0, rank, region, capacity, lambda: None))
            self.ends[rank] = worker.open_link(NewLink(0, "kv0", region, capacity, lambda: None))
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
