"""A KV rank and a weights rank on one GPU, for hosts in threads: the server has a part of it, attention the rest."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.crossings.most_of_a_gpu import MostOfAGpu
from benchmarks.full_models import full_spec
from benchmarks.ranks.driven import ReadyFFN
from benchmarks.ranks.hosted import RanksOfALane
from benchmarks.ranks.placed import FRAME_BYTES, PAGE_TOKENS, placed
from crosspool.backends.base import Progress
from crosspool.backends.cuda.channels.link import Site
from crosspool.backends.cuda.device.driver import Driver
from crosspool.backends.cuda.device.launch import DeviceKernels
from crosspool.backends.cuda.device.queues import ask_for_queues
from crosspool.backends.cuda.kv_frames.frames import ArenaFrames
from crosspool.backends.cuda.kv_rank.kv_passes import KVPassKind, KVWay
from crosspool.backends.cuda.kv_rank.kv_worker import CudaAttentionWorker
from crosspool.backends.cuda.loading.weights import AttentionWeights, random_attention_weights, random_ffn_weights
from crosspool.backends.cuda.steps.lane import enter
from crosspool.backends.cuda.steps.lane_memory import WaitRule
from crosspool.cluster.base import ModelPlacement
from crosspool.cluster.channel import link_bytes
from crosspool.cluster.region import FileRegion
from crosspool.cluster.worker import RankWorker
from crosspool.kv_pool.geometry import page_geometry
from crosspool.models.spec import ModelSpec
from crosspool.units import ceil_div

SEED, DEADLINE_S = 7, 4.0


class PreparedKV(CudaAttentionWorker):
    """Has weights; a load captures the passes of one row, since nothing may be captured while a server waits for it."""

    ready: tuple[ModelSpec, AttentionWeights]

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None:
        enter(self._site.device)
        self.add_weights(placement, *self.ready, 0)
        model = self._models.led(placement.name)
        for number, lane, links in self._lanes.open_to(placement.weights_ranks):
            for is_decode in (False, True):
                kind = KVPassKind(1, samples=True, is_decode=is_decode)
                self._passes.find(KVWay(placement.name, model, number, lane, links), kind)
            lane.prepare_loop(placement.name, links, kind)


class PreparedFFN(ReadyFFN):
    """As that one, in a thread of its own."""

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None:
        enter(self._site.device)
        super().add_model(placement, progress)


def ranks_on_one_gpu(model: str, server_sms: int, num_tokens: int, *, is_ahead: bool) -> RanksOfALane:
    """Random weights of the model's shape; room for one sequence of so many tokens."""
    ask_for_queues()
    device, spec = torch.device("cuda", 0), full_spec(model)
    torch.cuda.set_device(device)
    numbers, rule = {"kv0": 0, "w0": 0}, WaitRule(deadline_s=DEADLINE_S)
    kernels = [DeviceKernels(device) for _ in numbers]
    attention_sms = kernels[0].num_sms - server_sms
    geometry = page_geometry(spec, page_tokens=PAGE_TOKENS, frame_bytes=FRAME_BYTES)
    width, num_pages = geometry.frames_per_page, ceil_div(num_tokens, PAGE_TOKENS) + 2
    arena = torch.zeros(1 + width * num_pages, FRAME_BYTES, dtype=torch.uint8, device=device)
    arena.view(torch.bfloat16).normal_(0, 0.5, generator=torch.Generator(device=device).manual_seed(SEED))
    sites = [Site(rank, device, Driver(rank), numbers, None) for rank in numbers]
    parts: list[Any] = [MostOfAGpu(own, sms) for own, sms in zip(kernels, (attention_sms, server_sms), strict=True)]
    kv = PreparedKV(sites[0], parts[0], rule, ArenaFrames(arena), goes_ahead=is_ahead, run_lanes=1)
    ffn = PreparedFFN(sites[1], parts[1], rule, control="resident", goes_ahead=is_ahead, run_lanes=1)
    kv.ready = (spec, random_attention_weights(spec, SEED, device))
    ffn.ready = (spec, random_ffn_weights(spec, SEED, device))
    torch.cuda.synchronize()
    capacity = 64 * spec.hidden_size
    return RanksOfALane(
        workers={
            "kv0": RankWorker(attention_worker=kv, links=kv, ahead=kv if is_ahead else None),
            "w0": RankWorker(ffn_worker=ffn, links=ffn, ahead=ffn if is_ahead else None),
        },
        placement=placed("m", spec.hidden_size),
        capacity=capacity,
        region=FileRegion.create(link_bytes(capacity)),
        pages=tuple(tuple(range(1 + page * width, 1 + (page + 1) * width)) for page in range(num_pages)),
    )
