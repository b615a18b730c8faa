"""The two pools as frozen data: how much memory, how many ranks, what they compute on, and what excludes what."""

import math
from dataclasses import dataclass
from typing import Literal

from crosspool.models.spec import DType
from crosspool.units import KiB, MiB

HostLayout = Literal["inprocess", "processes"]
Backend = Literal["numpy", "cuda"]
Prefill = Literal["inline", "dedicated"]
Baseline = Literal["static", "elastic"]
Control = Literal["host", "graphs", "resident"]
Transport = Literal["auto", "peer", "host", "nvshmem"]
StepsAhead = Literal["host", "device"]
Route = Literal["ffn", "kv"]
Order = Literal["none", "ticket", "priority"]
WeightsSource = Literal["checkpoint", "random"]
KVBacking = Literal["arena", "vmm"]
KVSplitChoice = Literal["auto", "heads", "tokens", "one"]

CONTROLS: dict[Backend, tuple[Control, ...]] = {"numpy": ("host",), "cuda": ("graphs", "host", "resident")}
"""What may drive the layers of a decode step, the default first. NumPy ranks are driven by their hosts."""

BACKEND_DTYPES: dict[Backend, DType] = {"numpy": "float32", "cuda": "bfloat16"}
"""What each backend computes in and its cache holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolsConfig:
    """The two pools: how much memory, how many ranks, threads or processes, and what they compute on."""

    backend: Backend = "numpy"  # cuda: a GPU for the KV rank and one for each weights rank
    weights: WeightsSource = "checkpoint"  # random: drawn on the GPUs at the models' shapes
    control: Control | None = None  # what drives the layers of decode; None: the backend's default
    steps_ahead: StepsAhead = "host"  # where a lane's next decode step waits for the end of its present one
    order: Order | None = None  # of ready segments on a rank; None: priority, and ticket in a baseline
    route: Route = "ffn"  # the pool that chooses experts
    layout: HostLayout = "processes"
    baseline: Baseline | None = None  # None: two pools; else another layout of the same memory, to measure against
    kv_pool_bytes: int = 256 * MiB  # of each KV rank: one budget over all models, cut into frames
    host_pool_bytes: int = 0  # of each KV rank: host memory for cached KV that has to go; 0: it is dropped
    num_kv_ranks: int = 1
    kv_backing: KVBacking = "arena"  # vmm: frames are mapped into a range of addresses for each model
    kv_split: KVSplitChoice = "auto"  # of models that say nothing else
    frame_bytes: int = 2 * MiB
    num_weights_ranks: int = 1
    weights_shares: tuple[float, ...] = ()  # relative width of each weights rank's slices; none: equal ones
    prefill: Prefill = "inline"  # dedicated: by ranks that hold whole models, instead of by the pools
    num_prefill_ranks: int = 1  # with dedicated
    prefill_gpus: tuple[int, ...] = ()  # of each prefill rank; none: behind the pools', of their own
    prefill_pool_bytes: int | None = None  # of each one's GPU, for whole models; None: for two of the largest
    num_gpus: int | None = None  # that the ranks share, in turn; None: one for each
    transport: Transport = "auto"  # memory by which hidden states cross between GPUs

    def __post_init__(self) -> None:
        self._check_backend()
        self._check_counts()
        self._check_frames()
        self._check_shares()
        self._check_host_pool()
        self._check_transport()
        self._check_prefill()

    def _check_backend(self) -> None:
        """What one backend alone has."""
        if self.num_gpus is not None and self.backend != "cuda":
            raise ValueError(f"gpus is {self.num_gpus} with backend {self.backend}, which uses none; leave it out")
        if self.weights == "random" and self.backend != "cuda":
            raise ValueError(
                f"weights is random with backend {self.backend}; only the CUDA backend draws weights itself"
            )
        if self.control is not None and self.control not in CONTROLS[self.backend]:
            raise ValueError(
                f"control is {self.control} with backend {self.backend}, where it means nothing: the host runs every "
                "layer; leave it out, or use host"
            )
        if self.steps_ahead == "device" and self.driven_by == "host":
            raise ValueError(
                f"steps_ahead is device with backend {self.backend} and control host, which hands over nothing whole; "
                "leave it out, or use control graphs or resident"
            )

    def _check_counts(self) -> None:
        counts = {"gpus": self.num_gpus, "kv_ranks": self.num_kv_ranks, "weights_ranks": self.num_weights_ranks}
        for name, count in (counts | {"prefill_ranks": self.num_prefill_ranks}).items():
            if count is not None and count < 1:
                raise ValueError(f"{name} is {count}; it must be at least 1")

    def _check_frames(self) -> None:
        if self.frame_bytes < 4 * KiB:
            raise ValueError(f"frame_bytes is {self.frame_bytes}; it must be at least 4 KiB")
        if self.kv_pool_bytes < 2 * self.frame_bytes:
            raise ValueError(
                f"kv_pool_bytes is {self.kv_pool_bytes}; it must hold at least two frames of {self.frame_bytes} bytes"
            )
        if self.kv_backing == "vmm" and self.num_kv_ranks > 1:
            raise ValueError(f"kv_backing is vmm with kv_ranks {self.num_kv_ranks}; use arena, or one KV rank")

    def _check_prefill(self) -> None:
        given: dict[str, object] = {}
        if self.num_prefill_ranks > 1:
            given["prefill_ranks"] = self.num_prefill_ranks
        if self.prefill_gpus:
            given["prefill_gpus"] = list(self.prefill_gpus)
        if self.prefill_pool_bytes is not None:
            given["prefill_pool_bytes"] = self.prefill_pool_bytes
        for name, value in given.items():
            if self.prefill == "inline":
                raise ValueError(f"{name} is {value} with prefill inline; set prefill dedicated")
            if self.backend != "cuda" and name != "prefill_ranks":
                raise ValueError(f"{name} is {value} with backend {self.backend}, which uses no GPU; leave it out")
        if self.prefill_pool_bytes is not None and self.prefill_pool_bytes < 1:
            raise ValueError(f"prefill_pool_bytes is {self.prefill_pool_bytes}; it must be above 0, or left out")
        if self.prefill_gpus and len(self.prefill_gpus) != self.num_prefill_ranks:
            raise ValueError(
                f"prefill_gpus names {len(self.prefill_gpus)} GPUs for {self.num_prefill_ranks} prefill ranks; "
                "give one for each"
            )
        if any(gpu < 0 for gpu in self.prefill_gpus):
            raise ValueError(f"prefill_gpus is {list(self.prefill_gpus)}; GPUs are numbered from 0")
        if self.prefill == "dedicated" and self.transport == "nvshmem":
            raise ValueError("transport is nvshmem with prefill dedicated, whose ranks are not of its team; use auto")
        if self.prefill == "dedicated" and self.baseline is not None:
            raise ValueError(f"prefill is dedicated with baseline {self.baseline}, which has no pools; use inline")

    def _check_transport(self) -> None:
        if self.transport == "auto":
            return
        if self.backend != "cuda":
            raise ValueError(
                f"transport is {self.transport} with backend {self.backend}, which has no GPUs; leave it out"
            )
        if self.baseline is not None:
            raise ValueError(f"transport is {self.transport} with baseline {self.baseline}, where nothing crosses")
        num_ranks = self.num_kv_ranks + self.num_weights_ranks
        shares_gpus = self.num_gpus is not None and self.num_gpus < num_ranks
        if self.transport == "nvshmem" and (self.layout != "processes" or shares_gpus):
            raise ValueError(
                f"transport is nvshmem with layout {self.layout} and gpus {self.num_gpus or num_ranks} for {num_ranks} "
                "ranks; NVSHMEM wants a process and a GPU for each, so use peer"
            )

    def _check_host_pool(self) -> None:
        if self.host_pool_bytes == 0:
            return
        size = f"host_pool_bytes is {self.host_pool_bytes}"
        if self.host_pool_bytes < 2 * self.frame_bytes:
            raise ValueError(f"{size}; it must be 0, or hold at least two frames of {self.frame_bytes} bytes")
        if self.kv_backing == "vmm":
            raise ValueError(f"{size} with kv_backing vmm, whose frames move; use arena, or set 0")
        if self.baseline is not None:
            raise ValueError(f"{size} with baseline {self.baseline}, which has no pools; set 0")

    def _check_shares(self) -> None:
        shares = self.weights_shares
        if not shares:
            return
        if self.baseline is not None:
            raise ValueError(f"weights_shares is {list(shares)} with baseline {self.baseline}, which has no pools")
        if len(shares) != self.num_weights_ranks:
            raise ValueError(
                f"weights_shares has {len(shares)} shares for {self.num_weights_ranks} weights ranks; give one for each"
            )
        if not all(0 < share < math.inf for share in shares):
            raise ValueError(f"weights_shares is {list(shares)}; each must be a number above 0")

    @property
    def driven_by(self) -> Control:
        """What drives the layers of decode, also where nothing was asked for."""
        return self.control or CONTROLS[self.backend][0]
