"""A whole deployment as frozen data: which models, how the pools and the engine are sized, how the server listens.

`settings.py` fills these from flags, environment, YAML and defaults; nothing below the CLI reads any of those.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from crosspool.units import GiB, KiB, MiB

Layout = Literal["inprocess", "processes"]
Backend = Literal["numpy", "cuda"]
Prefill = Literal["inline", "dedicated"]
Baseline = Literal["static", "elastic"]
Control = Literal["host", "graphs", "resident"]
Transport = Literal["auto", "peer", "host", "nvshmem"]
StepsAhead = Literal["host", "device"]
Pipeline = Literal["on", "off"]
Route = Literal["ffn", "kv"]
Order = Literal["none", "ticket", "priority"]
WeightsSource = Literal["checkpoint", "random"]
KVBacking = Literal["arena", "vmm"]
AdmissionPolicy = Literal["reserve", "forecast"]
KVSplit = Literal["auto", "heads", "tokens", "one"]
DTypeChoice = Literal["auto", "float32", "float16", "bfloat16"]
LogLevel = Literal["critical", "error", "warning", "info", "debug"]
LogFormat = Literal["auto", "text", "json"]
MetricsCompat = Literal["vllm"]

CONTROLS: dict[Backend, tuple[Control, ...]] = {"numpy": ("host",), "cuda": ("graphs", "host", "resident")}
"""What may drive the layers of a decode step, the default first. NumPy ranks are driven by their hosts."""

DECODE_LANES = 2
"""Decode batches in flight at once, unless the deployment says otherwise or the pipeline is off."""

PREFILL_SHARE = 0.7
"""Part of a GPU that prompts keep to beside decode, unless the deployment says otherwise."""

PREFILL_TOKENS: dict[Backend, int] = {"numpy": 512, "cuda": 8192}
"""Tokens of a prefill step unless the deployment says otherwise: on GPUs large products want many rows."""

SPLIT_PREFILL_TOKENS = 512
"""The same with several KV ranks on GPUs, where models whose pages lie on all of them take prompts in small passes."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]i?B?|B)?", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "B": 1, "K": KiB, "M": MiB, "G": GiB}


def parse_size(text: str | int) -> int:
    """Bytes of `512MiB`, `2G`, `1.5 GiB` or a plain number. K, M and G are powers of 1024, with or without `i` and `B`.

    Raises ValueError, naming the text, for anything else.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f"{str(text)[:40]!r} is not a size; write bytes, or a number with KiB, MiB or GiB")
    number, unit = match.groups()
    return int(float(number) * _SIZE_UNITS[(unit or "").upper()[:1]])


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """One served model."""

    source: str  # a model directory, or a Hugging Face id
    name: str | None = None  # None: the directory's or repository's last part
    aliases: tuple[str, ...] = ()
    revision: str | None = None  # of a Hugging Face id
    max_model_len: int | None = None  # tokens of prompt + output; None: the model's own limit
    chat_template: str | None = None  # a file that replaces the model's own template
    page_tokens: int | None = None  # None: chosen so that frames are filled
    kv_floor_bytes: int = 0  # of each KV rank's memory, kept for this model
    kv_ceiling_bytes: int | None = None  # the most it may hold of each KV rank's memory; None: what there is
    kv_split: KVSplit | None = None  # how its KV lies over several KV ranks; None: as the deployment says

    def __post_init__(self) -> None:
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len is {self.max_model_len} for {self.source}; it must be at least 2")
        if self.page_tokens is not None and self.page_tokens < 1:
            raise ValueError(f"page_tokens is {self.page_tokens} for {self.source}; it must be at least 1")
        if self.kv_floor_bytes < 0:
            raise ValueError(f"kv_floor is {self.kv_floor_bytes} for {self.source}; it must not be negative")
        if self.kv_ceiling_bytes is not None and self.kv_ceiling_bytes < max(1, self.kv_floor_bytes):
            raise ValueError(
                f"kv_ceiling is {self.kv_ceiling_bytes} for {self.source}; it must be above 0 and its kv_floor or more"
            )

    @property
    def served_name(self) -> str:
        return self.name or self.source.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolsConfig:
    """The two pools: how much memory, how many ranks, threads or processes, and what they compute on."""

    backend: Backend = "numpy"  # cuda: a GPU for the KV rank and one for each weights rank
    weights: WeightsSource = "checkpoint"  # random: drawn on the GPUs at the models' shapes
    control: Control | None = None  # what drives the layers of decode; None: the backend's default
    steps_ahead: StepsAhead = "host"  # where a lane's next decode step waits for the end of its present one
    order: Order | None = None  # of ready segments on a rank; None: priority, and ticket in a baseline
    route: Route = "ffn"  # the pool that chooses experts
    layout: Layout = "processes"
    baseline: Baseline | None = None  # None: two pools; else another layout of the same memory, to measure against
    kv_pool_bytes: int = 256 * MiB  # of each KV rank: one budget over all models, cut into frames
    host_pool_bytes: int = 0  # of each KV rank: host memory for cached KV that has to go; 0: it is dropped
    num_kv_ranks: int = 1
    kv_backing: KVBacking = "arena"  # vmm: frames are mapped into a range of addresses for each model
    kv_split: KVSplit = "auto"  # of models that say nothing else
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
        if self.num_gpus is not None and self.backend != "cuda":
            raise ValueError(f"gpus is {self.num_gpus} with backend {self.backend}, which uses none; leave it out")
        if self.num_gpus is not None and self.num_gpus < 1:
            raise ValueError(f"gpus is {self.num_gpus}; it must be at least 1")
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
        if self.frame_bytes < 4 * KiB:
            raise ValueError(f"frame_bytes is {self.frame_bytes}; it must be at least 4 KiB")
        if self.kv_pool_bytes < 2 * self.frame_bytes:
            raise ValueError(
                f"kv_pool_bytes is {self.kv_pool_bytes}; it must hold at least two frames of {self.frame_bytes} bytes"
            )
        if self.num_kv_ranks < 1:
            raise ValueError(f"kv_ranks is {self.num_kv_ranks}; it must be at least 1")
        if self.kv_backing == "vmm" and self.num_kv_ranks > 1:
            raise ValueError(f"kv_backing is vmm with kv_ranks {self.num_kv_ranks}; use arena, or one KV rank")
        if self.num_weights_ranks < 1:
            raise ValueError(f"weights_ranks is {self.num_weights_ranks}; it must be at least 1")
        self._check_shares()
        self._check_host_pool()
        self._check_transport()
        self._check_prefill()

    def _check_prefill(self) -> None:
        if self.num_prefill_ranks < 1:
            raise ValueError(f"prefill_ranks is {self.num_prefill_ranks}; it must be at least 1")
        given = {"prefill_ranks": self.num_prefill_ranks > 1, "prefill_gpus": bool(self.prefill_gpus)}
        given["prefill_pool_bytes"] = self.prefill_pool_bytes is not None
        values = {
            "prefill_ranks": self.num_prefill_ranks,
            "prefill_gpus": list(self.prefill_gpus),
            "prefill_pool_bytes": self.prefill_pool_bytes,
        }
        for name in [name for name, is_given in given.items() if is_given]:
            if self.prefill == "inline":
                raise ValueError(f"{name} is {values[name]} with prefill inline; set prefill dedicated")
            if self.backend != "cuda" and name != "prefill_ranks":
                raise ValueError(
                    f"{name} is {values[name]} with backend {self.backend}, which uses no GPU; leave it out"
                )
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingConfig:
    """How much runs at once, how much may wait, and how requests are admitted to the KV pool."""

    max_num_seqs: int = 32  # running sequences per model
    max_num_batched_tokens: int = 512  # tokens of one prefill chunk
    max_queue: int = 64  # waiting sequences per model; one more is refused with 429
    max_queue_per_key: int | None = None  # waiting sequences of one API key per model; None: up to max_queue
    num_decode_lanes: int = DECODE_LANES
    num_prefill_lanes: int = 1
    decode_steps: int = 1  # that a decode batch may take by itself before the engine hands out more
    admission: AdmissionPolicy = "reserve"
    enable_prefix_caching: bool = True  # prompts that begin alike share pages, and ended ones leave theirs for reuse
    queue_timeout_s: float | None = None  # longest time in the queue, after which a request ends with 408
    recovery_timeout_s: float = 60.0  # how long requests wait for a lost worker; 0: they end with an error at once
    seed: int | None = None  # of requests without one; None: a fresh one for each
    batch_invariant: bool = (
        False  # prefill steps run one prompt alone: an answer depends on nothing that runs beside it
    )
    prefill_share: float = PREFILL_SHARE  # of a GPU's multiprocessors, for prompts while decode runs beside them

    def __post_init__(self) -> None:
        if not 0.1 <= self.prefill_share <= 0.9:
            raise ValueError(f"prefill_share is {self.prefill_share}; it must lie between 0.1 and 0.9")
        counts = ("max_num_seqs", "max_num_batched_tokens", "max_queue")
        for name in (*counts, "num_decode_lanes", "num_prefill_lanes", "decode_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.queue_timeout_s is not None and not self.queue_timeout_s > 0:
            raise ValueError(f"queue_timeout is {self.queue_timeout_s}; it must be above 0 seconds, or left out")
        if not self.recovery_timeout_s >= 0:  # so that NaN is refused as well
            raise ValueError(f"recovery_timeout is {self.recovery_timeout_s}; it must be 0 or more seconds")
        if self.batch_invariant and self.enable_prefix_caching:
            raise ValueError(
                "batch_invariant is on with enable_prefix_caching, by which a prompt's cut depends on what ran before; "
                "switch prefix caching off (--no-enable-prefix-caching)"
            )
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must lie between 0 and {2**63 - 1}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """How the HTTP server listens and what it lets in."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: no key is asked for
    admin_api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: admin routes are closed
    allowed_origins: tuple[str, ...] = ()  # none: CORS headers are not sent
    root_path: str = ""
    log_level: LogLevel = "info"
    quiet_paths: tuple[str, ...] = ("/health", "/health/ready", "/metrics", "/stats")  # left out of the access log
    shutdown_timeout_s: float = 30.0  # how long running requests may finish after SIGTERM
    max_body_bytes: int = 8 * MiB
    max_header_bytes: int = 32 * KiB
    ssl_certfile: str | None = None  # both or none: HTTPS
    ssl_keyfile: str | None = None
    log_format: LogFormat = "auto"
    otlp_traces_endpoint: str | None = None  # where a span of each request is sent, by OTLP over HTTP
    metrics_compat: MetricsCompat | None = None  # other names under which the common metrics are shown too
    sse_keep_alive_s: float = 10.0  # a comment line at this interval while a stream waits for its first token

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; it must lie between 0 (any free port) and 65535")
        if not self.shutdown_timeout_s >= 0:
            raise ValueError(f"shutdown_timeout is {self.shutdown_timeout_s}; it must be 0 or more seconds")
        if self.max_body_bytes < KiB:
            raise ValueError(f"max_body_bytes is {self.max_body_bytes}; it must be at least 1 KiB")
        if self.max_header_bytes < KiB:
            raise ValueError(f"max_header_bytes is {self.max_header_bytes}; it must be at least 1 KiB")
        if any(not key for key in (*self.api_keys, *self.admin_api_keys)):
            raise ValueError("an api_key is empty; remove it or give it a value")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("one of ssl_certfile and ssl_keyfile is missing; give both, or neither")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentConfig:
    """Everything `crosspool serve` needs to know."""

    models: tuple[ModelConfig, ...]
    pools: PoolsConfig = PoolsConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    server: ServerConfig = ServerConfig()
    dtype: DTypeChoice = "auto"
    download_dir: str | None = None

    def __post_init__(self) -> None:
        if self.pools.host_pool_bytes and not self.scheduling.enable_prefix_caching:
            raise ValueError(
                f"host_pool_bytes is {self.pools.host_pool_bytes} without enable_prefix_caching, which is what finds "
                "KV there; turn it on, or set host_pool_bytes 0"
            )
        share = self.scheduling.prefill_share
        if share != PREFILL_SHARE and self.pools.backend != "cuda":
            raise ValueError(
                f"prefill_share is {share} with backend {self.pools.backend}, where prompts and decode take turns; "
                "leave it out"
            )
        taken: dict[str, str] = {}
        for model in self.models:
            for name in (model.served_name, *model.aliases):
                if name in taken:
                    raise ValueError(
                        f"two models are called {name!r}: {taken[name]} and {model.source}; "
                        "give one another name (NAME=DIR, or `name:` in the YAML file)"
                    )
                taken[name] = model.source
