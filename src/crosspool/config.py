"""A whole deployment as frozen data: which models, how the pools and the engine are sized, how the server listens.

`deployment/load.py` fills these from settings; nothing below the CLI reads flags, environment or YAML.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

from crosspool.pools_config import Backend, KVSplitChoice, PoolsConfig
from crosspool.units import KiB, MiB

Pipeline = Literal["on", "off"]
AdmissionPolicy = Literal["reserve", "forecast"]
DTypeChoice = Literal["auto", "float32", "float16", "bfloat16"]
LogLevel = Literal["critical", "error", "warning", "info", "debug"]
LogFormat = Literal["auto", "text", "json"]
MetricsCompat = Literal["vllm"]

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
"""What browsers send as Origin, in lower case and without a path."""

DECODE_LANES = 2
"""Decode batches in flight at once, unless the deployment says otherwise or the pipeline is off."""

WIDE_POOL = 3
"""Weights GPUs from which on one more is the default: attention is as busy as FFNs then (decision 20)."""

PREFILL_SHARE = 0.7
"""Part of a GPU that prompts keep to beside decode, unless the deployment says otherwise."""

PREFILL_TOKENS: dict[Backend, int] = {"numpy": 512, "cuda": 8192}
"""Tokens of a prefill step unless the deployment says otherwise: on GPUs large products want many rows."""

SPLIT_PREFILL_TOKENS = 512
"""The same with several KV ranks on GPUs, where models whose pages lie on all of them take prompts in small passes."""


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
    kv_split: KVSplitChoice | None = None  # how its KV lies over several KV ranks; None: as the deployment says

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
    listen_fd: int | None = None  # a socket that listens already; host and port are its own
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
    sse_keep_alive_s: float = 10.0  # a comment line at this interval while a stream waits for a token

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
        for origin in self.allowed_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(f"allowed_origins has {origin!r}; an origin is scheme://host[:port], or *")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("one of ssl_certfile and ssl_keyfile is missing; give both, or neither")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentConfig:
    """Everything `crosspool serve` needs to know."""

    models: tuple[ModelConfig, ...]
    pools: PoolsConfig = field(default_factory=PoolsConfig)
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
