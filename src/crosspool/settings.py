"""The settings of a deployment, each with its type, default and description.

One name everywhere: the flag `--max-num-seqs`, the variable `CROSSPOOL_MAX_NUM_SEQS` and the YAML key `max_num_seqs`
are the same setting. The JSON schema of the YAML file is published as docs/deployment.schema.json. Which source wins,
and what a deployment makes of the values, is in `deployment/load.py`.
"""

import json
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from crosspool.config import (
    PREFILL_SHARE,
    AdmissionPolicy,
    DTypeChoice,
    LogFormat,
    LogLevel,
    MetricsCompat,
    Pipeline,
)
from crosspool.pools_config import (
    Backend,
    Baseline,
    Control,
    HostLayout,
    KVBacking,
    KVSplitChoice,
    Order,
    Prefill,
    Route,
    StepsAhead,
    Transport,
    WeightsSource,
)
from crosspool.units import parse_size

ENV_PREFIX = "CROSSPOOL_"

Size = Annotated[int | str, Field(description="bytes, or a number with KiB, MiB or GiB")]
Words = Annotated[list[str], NoDecode, Field(description="a list; separated by commas in an environment variable")]
Integers = Annotated[list[int], NoDecode, Field(description="a list; separated by commas in a flag or a variable")]
Numbers = Annotated[list[float], NoDecode, Field(description="a list; separated by commas in a flag or a variable")]


class ModelSettings(BaseModel):
    """One entry of `models:`."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(description="a Hugging Face model directory, or a Hugging Face id")
    name: str | None = Field(None, description="the name requests use; default: last part of the path")
    aliases: list[str] = Field([], description="other names that answer as this model")
    revision: str | None = Field(None, description="branch, tag or commit of a Hugging Face id")
    max_model_len: int | None = Field(None, description="tokens of prompt + output; default: the model's own limit")
    chat_template: str | None = Field(None, description="a file with a Jinja chat template instead of the model's own")
    page_tokens: int | None = Field(None, description="tokens of one KV page; default: chosen to fill frames")
    kv_split: KVSplitChoice | None = Field(
        None, description="over KV ranks: heads, tokens, one or auto; default: kv_split"
    )
    kv_floor: Size = Field(0, description="part of the KV pool that is kept for this model")
    kv_ceiling: Size | None = Field(None, description="the most it may hold of the KV pool; default: what there is")

    @field_validator("kv_floor", "kv_ceiling")
    @classmethod
    def _bytes(cls, value: str | int | None) -> int | None:
        return None if value is None else parse_size(value)


class Settings(BaseSettings):
    """A CrossPool deployment: the models and how they are served."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", title="CrossPool deployment")

    models: Annotated[list[ModelSettings], NoDecode] = Field([], description="the models; default: the demo models")
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for every interface")
    port: int = Field(8000, description="port to listen on; 0: any free one")
    listen_fd: int | None = Field(
        None,
        ge=0,
        description="descriptor of a listening socket that whoever starts the server hands over; default: none",
    )
    api_key: Words = Field([], description="keys that requests must carry one of; health routes are open")
    admin_api_key: Words = Field([], description="keys of the admin routes; default: they are closed")
    allowed_origins: Words = Field([], description="origins that browsers may call from (CORS); default: none")
    root_path: str = Field("", description="path prefix that a proxy in front strips")
    log_level: LogLevel = Field("info", description="what is logged")
    disable_access_log_for_endpoints: Words = Field(
        ["/health", "/health/ready", "/metrics", "/stats"], description="paths left out of the access log"
    )
    shutdown_timeout: float = Field(30.0, description="seconds that running requests may finish in after SIGTERM")
    max_body_bytes: Size = Field("8MiB", description="largest request body; more is a 413")
    max_header_bytes: Size = Field("32KiB", description="largest request headers; more is a 431")
    ssl_certfile: str | None = Field(None, description="certificate file in PEM; with ssl_keyfile the server is HTTPS")
    ssl_keyfile: str | None = Field(None, description="key file in PEM")
    log_format: LogFormat = Field("auto", description="json: one object a line; auto: coloured text on a terminal")
    otlp_traces_endpoint: str | None = Field(None, description="URL that spans of requests are sent to (OTLP, HTTP)")
    metrics_compat: MetricsCompat | None = Field(None, description="vllm: the common metrics also under vLLM's names")
    sse_keep_alive_interval: float = Field(10.0, gt=0, description="seconds between comment lines of waiting streams")
    backend: Backend = Field("numpy", description="what computes: numpy on CPUs, or cuda with a GPU for each rank")
    weights: WeightsSource = Field(
        "checkpoint", description="random: seeded weights of the models' shapes, without checkpoints; for measurements"
    )
    control: Control | None = Field(
        None,
        description="what drives decode on GPUs: host (each half of a layer), graphs (of steps), or resident: graphs "
        "and an FFN server that stays on the weights ranks; default: graphs. On CPUs it is the host",
    )
    steps_ahead: StepsAhead = Field(
        "host",
        description="where a lane's next decode step waits for the end of its present one: the host, or the device, "
        "so that GPUs need no host between two steps",
    )
    pipeline: Pipeline = Field(
        "on",
        description="off: one decode batch in flight, so that the pools take turns instead of working side by side",
    )
    order: Order | None = Field(
        None, description="which lane's ready segment a rank runs next: none, ticket, or priority, the default"
    )
    route: Route = Field(
        "ffn", description="the pool that chooses experts: ffn, beside them, or kv: choices cross with the rows"
    )
    layout: HostLayout = Field(
        "processes",
        description="a process for each rank, or all in this one; static or elastic: the baseline",
        json_schema_extra={"enum": ["inprocess", "processes", "crosspool", *get_args(Baseline)]},
    )
    baseline: Baseline | None = Field(
        None, description="serve without pools, to measure against: whole models with KV of their own, or KV shared"
    )
    kv_pool_bytes: Size = Field("256MiB", description="the KV pool that all models share; on each of several KV ranks")
    host_pool_bytes: Size = Field(
        "0", description="host memory of each KV rank for cached KV that has to make room; 0: it is dropped"
    )
    frame_bytes: Size = Field("2MiB", description="granularity of KV memory")
    kv_ranks: int = Field(1, description="ranks that hold KV, with kv_pool_bytes each")
    kv_backing: KVBacking = Field("arena", description="one allocation, or vmm: frames mapped into a range a model")
    kv_split: KVSplitChoice = Field(
        "auto", description="how a model's KV lies over KV ranks: heads, tokens, one or auto"
    )
    weights_ranks: int = Field(1, description="ranks that every FFN is sliced over")
    weights_shares: Numbers = Field(
        [], description="relative width of each weights rank's slices, such as 3,1; default: equal ones"
    )
    prefill: Prefill = Field(
        "inline",
        description="prompts run in the pools, or dedicated: on ranks that hold whole models, which take turns",
    )
    prefill_ranks: int = Field(1, description="ranks that compute prompts, with prefill dedicated; a lane for each")
    transport: Transport = Field(
        "auto",
        description="memory by which hidden states cross between GPUs: peer, host or nvshmem; auto: a peer's where "
        "GPUs reach each other, else the host's",
    )
    prefill_gpus: Integers = Field(
        [], description="GPU of each prefill rank, such as 1; default: GPUs of their own, behind those of the pools"
    )
    prefill_pool_bytes: Size | None = Field(
        None,
        description="memory of each prefill rank's GPU for whole models, which take turns in it; default: two of the "
        "largest",
    )
    gpus: int | None = Field(
        None,
        description="GPUs of all ranks, with cuda: prefill ranks get the last ones, unless prefill_gpus places them, "
        "the pools share the others in turn; default: one for each",
    )
    max_num_seqs: int = Field(32, description="sequences of a model that run at once")
    max_num_batched_tokens: int | None = Field(
        None, description="prompt tokens of one prefill step; default: 512; 8192 with cuda and one KV rank"
    )
    max_queue: int = Field(64, description="sequences of a model that may wait; one more is a 429")
    max_queue_per_key: int | None = Field(None, description="sequences of one API key that may wait for a model")
    decode_lanes: int | None = Field(
        None, description="decode batches in flight at once; default: 2, 3 with three weights GPUs, 1 with pipeline off"
    )
    prefill_lanes: int = Field(1, description="prefill chunks in flight at once")
    decode_steps: int = Field(1, description="decode steps that a batch may take by itself, without the engine")
    admission: AdmissionPolicy = Field("reserve", description="reserve pages for the whole answer, or forecast them")
    enable_prefix_caching: bool = Field(True, description="keep full pages for later prompts that begin alike")
    batch_invariant: bool = Field(
        False, description="prefill steps run one prompt alone, so that no answer depends on what runs beside it"
    )
    prefill_share: float = Field(
        PREFILL_SHARE,
        description="part of a GPU that prompts keep to while other sequences decode there, 0.1 to 0.9: less shortens "
        "the time between their tokens, more the time to a prompt's first token",
    )
    queue_timeout: float | None = Field(None, description="seconds a request may wait; then it is a 408")
    recovery_timeout: float = Field(60.0, description="seconds that requests wait for a lost worker")
    seed: int | None = Field(None, description="seed of requests that give none; default: a fresh one for each")
    max_model_len: int | None = Field(None, description="context limit of every model that sets none itself")
    chat_template: str | None = Field(None, description="template file of every model that sets none itself")
    dtype: DTypeChoice = Field("auto", description="dtype of weights in memory; auto: the backend's own")
    download_dir: str | None = Field(None, description="where Hugging Face ids are stored; default: the hub's cache")

    @model_validator(mode="before")
    @classmethod
    def _name_baseline(cls, values: Any) -> Any:
        """`layout` may name a baseline, or the two pools, as `crosspool simulate` has it: in processes."""
        layout = values.get("layout") if isinstance(values, dict) else None
        if layout not in ("crosspool", *get_args(Baseline)):
            return values
        named = None if layout == "crosspool" else layout
        given = values.get("baseline", named)
        if given != named:
            raise ValueError(f"layout is {layout!r} and baseline {given!r}; give one of them")
        return {**values, "layout": "processes", "baseline": named}

    @field_validator(
        "allowed_origins", "weights_shares", "prefill_gpus", "disable_access_log_for_endpoints", mode="before"
    )
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return [value]  # a file's `prefill_gpus: 1`
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("api_key", "admin_api_key", mode="before")
    @classmethod
    def _split_keys(cls, value: Any) -> Any:
        """Empty parts stay and are refused later: an unset variable must not open the server to everyone."""
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value

    @field_validator("models", mode="before")
    @classmethod
    def _name_paths(cls, value: Any) -> Any:
        """`models:` may hold bare paths; an environment variable separates them by commas."""
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if isinstance(value, list):
            return [{"path": item} if isinstance(item, str) else item for item in value]
        return value

    @field_validator(
        "kv_pool_bytes", "host_pool_bytes", "prefill_pool_bytes", "frame_bytes", "max_body_bytes", "max_header_bytes"
    )
    @classmethod
    def _bytes(cls, value: str | int | None) -> int | None:
        """So that what is no size is told with the setting's name."""
        return None if value is None else parse_size(value)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings)


def deployment_schema() -> dict[str, Any]:
    """JSON schema of the YAML file, for editors (`# yaml-language-server: $schema=...`)."""
    return Settings.model_json_schema()


if __name__ == "__main__":  # python -m crosspool.settings > docs/deployment.schema.json
    print(json.dumps(deployment_schema(), indent=2))
