"""What `crosspool plan` reads: models, GPUs and load in one YAML file, checked before anything is computed.

Not the file of `crosspool serve`: that one describes how to run, this one what to expect. See docs/guides/planning.md.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from crosspool.config import PREFILL_TOKENS
from crosspool.deployment.yaml_file import read_mapping
from crosspool.planner.gpus import gpu_kind
from crosspool.planner.group import GPUSet
from crosspool.planner.memory import MemoryFigures, StepBounds
from crosspool.pools_config import KVSplitChoice
from crosspool.units import GiB, MiB, parse_size

Rate = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _size(value: Any) -> Any:
    """Bytes of a number or of text such as 80GB or 512MiB. GB and MB are decimal here, as on data sheets of GPUs."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    text = str(value).strip()
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        number = text.upper().removesuffix(unit).strip()
        if number != text.upper() and number.replace(".", "", 1).isdigit():
            return round(float(number) * factor)
    return parse_size(text)


Bytes = Annotated[int, BeforeValidator(_size), Field(ge=0)]


class GPUs(_Section):
    """The GPUs to plan for."""

    kind: str = Field(description="a100-40gb, a100-80gb, h100-80gb or h200")
    count: int = Field(ge=1, description="GPUs in all")
    per_group: int | None = Field(None, ge=1, description="GPUs that reach each other fast; default: all, at most 8")
    memory: Bytes | None = Field(None, description="bytes of each GPU; default: the kind's own")
    used: Bytes = Field(0, description="bytes of each GPU that others hold already")
    kv: int | Literal["auto"] = Field("auto", description="KV GPUs of each group; auto: searched")
    prefill: int = Field(0, ge=0, description="GPUs of each group for prompts alone, where whole models take turns")
    prefill_pool: Bytes | None = Field(
        None, description="bytes of each of them for whole models; default: two of the largest, or what there is"
    )
    host_memory: Bytes | None = Field(
        None, description="bytes of the host of a group, where prefill ranks keep whole models; default: not asked"
    )

    @field_validator("kind")
    @classmethod
    def _known(cls, value: str) -> str:
        return gpu_kind(value).name

    @model_validator(mode="after")
    def _whole_groups(self) -> "GPUs":
        if self.count % self.group_size:
            raise ValueError(f"{self.count} GPUs are no whole number of groups of {self.group_size}; set per_group")
        if self.prefill >= self.group_size:
            raise ValueError(
                f"prefill is {self.prefill} of {self.group_size} GPUs a group; the pools need at least one of them"
            )
        for name in ("prefill_pool", "host_memory"):
            if not self.prefill and (given := getattr(self, name)) is not None:
                raise ValueError(f"{name} is {given} without GPUs for prefill; set prefill, or leave it out")
        return self

    @property
    def group_size(self) -> int:
        return self.per_group or min(self.count, 8)

    @property
    def pool_size(self) -> int:
        """GPUs of a group that hold the two pools."""
        return self.group_size - self.prefill

    @property
    def memory_bytes(self) -> int:
        return self.memory or gpu_kind(self.kind).memory_bytes


class LengthsFrom(_Section):
    """Lengths: a file of pairs, or means and coefficients of variation."""

    file: Path | None = Field(None, description="CSV or JSON lines with prompt and output tokens")
    prompt: Positive | None = Field(None, description="mean prompt tokens")
    output: Positive | None = Field(None, description="mean output tokens")
    prompt_cv: Positive = 1.0
    output_cv: Positive = 1.0
    correlation: float = Field(0.0, ge=-1, le=1)
    longest: int = Field(0, ge=0, description="cut prompts and outputs at this many tokens; 0: no cut")

    @model_validator(mode="after")
    def _one_kind(self) -> "LengthsFrom":
        if (self.file is None) == (self.prompt is None or self.output is None):
            raise ValueError("lengths need either a file, or both prompt and output means")
        return self


class ServeGenFrom(_Section):
    """One client of a ServeGen service as the load: its rates over the day and its lengths."""

    rates: Path
    lengths: Path
    client: int


class ModelEntry(_Section):
    """One model and its load. Without a rate and outside a trace it takes memory for weights only."""

    model: str = Field(description="catalogue name, model directory, or Hugging Face id")
    name: str | None = Field(None, description="name in the plan and in the trace; default: that of the model")
    rate: Rate = Field(0.0, description="requests per second")
    cv: Positive = Field(1.0, description="burstiness of arrivals; 1: Poisson")
    lengths: LengthsFrom | None = None
    servegen: ServeGenFrom | None = Field(None, description="a recorded client's day; rate scales it, where given")
    max_tokens: int | None = Field(None, ge=1, description="output tokens clients ask for; default: what they get")
    context: int = Field(0, ge=0, description="context to guarantee: prompt + output of one request")
    page_tokens: int | None = Field(None, ge=1)
    floor: int | None = Field(None, ge=0, description="pages kept for this model; default: one median request")
    kv_parallelism: KVSplitChoice = "auto"

    @model_validator(mode="after")
    def _has_lengths(self) -> "ModelEntry":
        if self.servegen is not None and self.lengths is not None:
            raise ValueError(f"{self.model} has lengths and a servegen client, which has its own; remove one of them")
        if self.rate and self.lengths is None and self.servegen is None:
            raise ValueError(f"{self.model} has a rate but no lengths; give lengths: {{prompt: 1000, output: 300}}")
        return self


class TraceFrom(_Section):
    """A recorded trace as the load of several models at once."""

    file: Path
    format: str = "auto"
    model: str | None = Field(None, description="name of the model of a file that names none")
    names: dict[str, str] = Field({}, description="names in the trace to names of models here")
    period: Positive | None = Field(None, description="seconds after which the trace repeats; default: its length")


class Service(_Section):
    """How long requests hold KV, where the trace does not say."""

    cost: Literal["steady", "roofline", "simulator"] = "roofline"
    tbt_ms: Annotated[float | None, Field(gt=0, description="time between tokens, for cost steady")] = None
    prefill_tokens_per_s: Positive = 10000.0
    measured: Annotated[list[Path], Field(description="measured stage times, for cost simulator")] = []

    @model_validator(mode="after")
    def _steady_has_tbt(self) -> "Service":
        if self.cost == "steady" and self.tbt_ms is None:
            raise ValueError("cost steady needs tbt_ms")
        if self.cost == "simulator" and self.tbt_ms is not None:
            raise ValueError("tbt_ms is given, but cost simulator finds it; remove one of them")
        if self.measured and self.cost != "simulator":
            raise ValueError(f"measured stage times are for cost simulator, not {self.cost}; change one of them")
        return self


class Engine(_Section):
    """The largest steps, as `crosspool serve` takes them."""

    max_num_seqs: Count = 32
    max_num_batched_tokens: Count | None = None  # none: what GPUs take by themselves
    decode_lanes: Count = 2
    prefill_lanes: Count = 1
    frame_bytes: Bytes = 2 * MiB

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a prefill step as a plan for GPUs takes it."""
        return self.max_num_batched_tokens or PREFILL_TOKENS["cuda"]


class Memory(_Section):
    """Figures that no formula gives."""

    runtime: Bytes = 1 * GiB
    graphs: Bytes = 32 * MiB
    reserve_percent: Annotated[float, Field(ge=0, lt=100)] = 1.0


class PlanInput(_Section):
    """The whole file."""

    gpus: GPUs
    models: list[ModelEntry] = Field(min_length=1)
    trace: TraceFrom | None = None
    service: Service = Service()
    engine: Engine = Engine()
    memory: Memory = Memory()
    admission: Literal["reserve", "forecast"] = "forecast"
    quantile: float = Field(0.99, gt=0, lt=1)
    precision: float = Field(0.01, gt=0, lt=1)
    confidence: float = Field(0.95, gt=0, lt=1)
    seed: int = Field(0, ge=0)

    @property
    def bounds(self) -> StepBounds:
        return StepBounds(
            max_num_seqs=self.engine.max_num_seqs,
            max_num_batched_tokens=self.engine.chunk_tokens,
            num_decode_lanes=self.engine.decode_lanes,
            num_prefill_lanes=self.gpus.prefill or self.engine.prefill_lanes,
            frame_bytes=self.engine.frame_bytes,
            num_prefill_ranks=self.gpus.prefill,
        )

    @property
    def figures(self) -> MemoryFigures:
        return MemoryFigures(
            runtime_bytes=self.memory.runtime,
            graph_bytes=self.memory.graphs,
            reserve_fraction=self.memory.reserve_percent / 100.0,
        )

    @property
    def gpu_set(self) -> GPUSet:
        """The GPUs of one group's pools."""
        return GPUSet(num_gpus=self.gpus.pool_size, memory_bytes=self.gpus.memory_bytes, used_bytes=self.gpus.used)

    @property
    def num_groups(self) -> int:
        return self.gpus.count // self.gpus.group_size

    def kv_choices(self) -> Sequence[int]:
        """Numbers of KV GPUs of a group to try. Raises ValueError where the asked one leaves no weights GPU."""
        wanted, num_gpus = self.gpus.kv, self.gpus.pool_size
        if num_gpus == 1:
            return (1,)
        if wanted == "auto":
            return range(1, num_gpus)
        if not 1 <= wanted < num_gpus:
            beside = " for the pools" if self.gpus.prefill else ""
            raise ValueError(
                f"gpus.kv is {wanted} of {num_gpus} GPUs a group{beside}; it must lie between 1 and {num_gpus - 1}"
            )
        return (wanted,)

    @field_validator("models", mode="before")
    @classmethod
    def _bare_names(cls, value: Any) -> Any:
        if isinstance(value, list):
            return [{"model": item} if isinstance(item, str) else item for item in value]
        return value


def read_plan_input(path: Path) -> PlanInput:
    """The checked file; paths in it count from its folder. Raises ValueError, in one line, naming key and value."""
    return parse_plan_input(read_mapping(path, "with gpus: and models:"), path.parent, str(path))


def parse_plan_input(values: dict[str, Any], folder: Path = Path(), source: str = "plan input") -> PlanInput:
    """The same from a mapping."""
    try:
        parsed = PlanInput.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        what = "is not a setting" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
        given = "" if first["type"] in ("missing", "value_error") else f" (given: {str(first['input'])[:60]!r})"
        raise ValueError(f"{source}: {where}: {what}{given}") from None
    return _with_paths(parsed, folder)


def _with_paths(parsed: PlanInput, folder: Path) -> PlanInput:
    models = []
    for entry in parsed.models:
        update: dict[str, Any] = {}
        if entry.lengths is not None and entry.lengths.file is not None:
            update["lengths"] = entry.lengths.model_copy(update={"file": folder / entry.lengths.file})
        if (client := entry.servegen) is not None:
            paths = {"rates": folder / client.rates, "lengths": folder / client.lengths}
            update["servegen"] = client.model_copy(update=paths)
        if (folder / entry.model).is_dir():
            update["model"] = str(folder / entry.model)
        models.append(entry.model_copy(update=update))
    changed: dict[str, Any] = {"models": models}
    if parsed.service.measured:
        tables = [folder / path for path in parsed.service.measured]
        changed["service"] = parsed.service.model_copy(update={"measured": tables})
    if parsed.trace is not None:
        changed["trace"] = parsed.trace.model_copy(update={"file": folder / parsed.trace.file})
    return parsed.model_copy(update=changed)
