"""KV workers and a weights worker of one model, driven in one thread: to see split KV, mapped frames, one request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.ranks.one_row_step import one_row_step
from crosspool.backends.base import HalfStep, Inlet, LaneLinks, NewLink, Outlet, Wait
from crosspool.backends.cuda.channels.link import Site
from crosspool.backends.cuda.device.driver import Driver
from crosspool.backends.cuda.device.launch import DeviceKernels
from crosspool.backends.cuda.kv_frames.frames import KVFrames
from crosspool.backends.cuda.kv_rank.kv_worker import CudaAttentionWorker
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.loading.weights import AttentionWeights
from crosspool.backends.cuda.steps.lane import on_device
from crosspool.backends.cuda.steps.lane_memory import WaitRule
from crosspool.backends.cuda.weights_rank.ffn_worker import CudaFFNWorker
from crosspool.cluster.base import ModelPlacement
from crosspool.cluster.channel import link_bytes
from crosspool.cluster.region import ArrayRegion
from crosspool.core import SampledToken, SamplingParams
from crosspool.kv_pool.pool import Page
from crosspool.kv_pool.split import exchange_width
from crosspool.models.spec import ModelSpec
from crosspool.scheduler.step import StepDescriptor

MAX_TOKENS = 64
DEADLINE_S = 5.0


class RanksInOneProcess:
    """One lane. `frames`: of each KV rank, in order; the first is the model's home.

    weights_kernels: of the weights rank's GPU, where that is not the KV ranks'.
    """

    def __init__(
        self,
        kernels: DeviceKernels,
        spec: ModelSpec,
        attention: AttentionWeights,
        ffn: Sequence[FFNLayerWeights],
        frames: Sequence[KVFrames],
        page_tokens: int,
        weights_kernels: DeviceKernels | None = None,
    ) -> None:
        weights_kernels = weights_kernels or kernels
        self.names = tuple(f"kv{idx}" for idx in range(len(frames)))
        self.home, self.shares = self.names[0], self.names[1:]
        split = "tokens" if self.shares else "one"
        placement = ModelPlacement(
            name="model",
            directory=Path(),
            hidden_size=spec.hidden_size,
            kv_rank=self.home,
            kv_peers=self.shares,
            kv_split=split,  # type: ignore[arg-type]
            exchange_width=exchange_width(spec, split),  # type: ignore[arg-type]
            weights_ranks=("w0",),
            page_tokens=page_tokens,
            frame_bytes=frames[0].frame_bytes,
            kv_dtype="bfloat16",
        )
        on = dict.fromkeys(self.names, kernels.device) | {"w0": weights_kernels.device}
        self._devices = on
        devices = {rank: device.index or 0 for rank, device in on.items()}
        rule = WaitRule(deadline_s=DEADLINE_S)
        for rank, index in devices.items():
            for peer in set(devices.values()) - {index}:
                with torch.cuda.device(index):
                    Driver(rank).enable_peer_access(peer)

        def site(rank: str) -> Site:
            return Site(rank, on[rank], Driver(rank), devices, None)

        num_frames = frames[0].num_bytes // frames[0].frame_bytes
        self.kv = {
            name: CudaAttentionWorker(
                site(name),
                kernels,
                rule,
                own,
                first_frame=idx * num_frames if self.shares else None,
                kv_ranks=self.names,
            )
            for idx, (name, own) in enumerate(zip(self.names, frames, strict=True))
        }
        self.ffn = CudaFFNWorker(site("w0"), weights_kernels, rule)
        self._ends: dict[tuple[str, str], tuple[Outlet, Inlet]] = {}
        self._open(self.home, "w0", spec.hidden_size)
        for peer in self.shares:
            self._open(self.home, peer, placement.exchange_width)
        self.kv[self.home].add_weights(placement, spec, attention, 0)
        for peer in self.shares:
            self.kv[peer].add_share(placement, spec)
        self.ffn.add_weights("model", spec, ffn)
        self._seq = 0

    def _open(self, near: str, far: str, width: int) -> None:
        capacity = width * MAX_TOKENS
        region = ArrayRegion(link_bytes(capacity)).map()
        is_far = far in self.kv
        other = self.kv[far] if is_far else self.ffn
        self._ends[near, far] = self.kv[near].open_link(NewLink(0, far, region, capacity, lambda: None))
        self._ends[far, near] = other.open_link(NewLink(0, near, region, capacity, lambda: None, is_far))

    def step(
        self,
        sequence_id: int,
        token_ids: Sequence[int] | None,
        num_cached: int,
        *,
        new_pages: Sequence[Page] = (),
        joining: SamplingParams | None = None,
    ) -> SampledToken:
        """One step of one sequence: the tokens at positions from `num_cached` on; None: the one it sampled last.

        joining: it is new here.
        """
        self._seq += 1
        step = one_row_step(
            "model",
            self.home,
            self._seq,
            sequence_id,
            token_ids,
            num_cached,
            new_pages=new_pages,
            joining=joining,
        )
        (token,) = self._run(step)
        return token

    def _run(self, step: StepDescriptor) -> tuple[SampledToken, ...]:
        halves: dict[str, HalfStep[object]] = {
            self.home: self.kv[self.home].run(step, self._links(self.home, ("w0",), self.shares))
        }
        for name in self.shares:
            share = self.kv[name].run_share(step, self._links(name, (), (self.home,)))
            if share is not None:
                halves[name] = share
        halves["w0"] = self.ffn.run(step.header, self._links("w0", (self.home,), ()))
        waits: dict[str, Wait | None] = dict.fromkeys(halves)
        result: object = None
        until_s = time.monotonic() + 4 * DEADLINE_S
        while halves:
            for name in list(halves):
                wait = waits[name]
                with on_device(self._devices[name]):  # links open on the current one
                    if wait is not None and not wait.satisfied():
                        continue
                    try:
                        waits[name] = next(halves[name])
                    except StopIteration as stop:
                        result = stop.value if name == self.home else result
                        del halves[name]
            if time.monotonic() > until_s:
                raise RuntimeError(f"step {step.header.step_seq} does not end: {sorted(halves)} wait")
        assert isinstance(result, tuple)
        return result

    def _links(self, rank: str, peers: Sequence[str], exchange: Sequence[str]) -> LaneLinks:
        return LaneLinks(
            outlets={peer: self._ends[rank, peer][0] for peer in peers},
            inlets={peer: self._ends[rank, peer][1] for peer in peers},
            exchange_outlets={peer: self._ends[rank, peer][0] for peer in exchange},
            exchange_inlets={peer: self._ends[rank, peer][1] for peer in exchange},
        )
