"""What a run was told to do, as the command line gives it."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSettings:
    """The flags of `crosspool bench`. Values that may differ by model stay words until the models are known."""

    base_url: tuple[str, ...]  # of all models, or MODEL=URL for one
    endpoint: str = "/v1/completions"
    api_key: str | None = field(default=None, repr=False)
    models: tuple[str, ...] = ()  # none: all that the server lists
    request_rate: tuple[str, ...] = ("inf",)
    burstiness: float = 1.0
    ramp: str | None = None  # linear or exponential, over duration_s
    ramp_start_rps: float | None = None
    ramp_end_rps: float | None = None
    max_concurrency: int | None = None
    num_prompts: int | None = None
    duration_s: float | None = None
    input_len: tuple[str, ...] = ("128",)
    output_len: tuple[str, ...] = ("64",)
    lengths: tuple[str, ...] = ()
    max_model_len: int | None = None
    trace: Path | None = None
    trace_format: str = "auto"
    trace_model: str | None = None
    trace_names: tuple[str, ...] = ()
    trace_speed: float = 1.0
    start_s: float = 0.0  # of the trace, or of ServeGen's rates
    skips_unserved: bool = False  # requests of a trace's models that are not served
    length_scale: float = 1.0
    servegen_rates: Path | None = None
    servegen_lengths: Path | None = None
    servegen_clients: tuple[str, ...] = ()
    ignore_eos: bool = True
    temperature: float | None = None
    vocab_size: int = 1000
    tokenizer: Path | None = None  # of chat prompts, which then have exactly the tokens asked for
    extra_body: str | None = None
    seed: int = 0
    num_warmups: int = 1
    timeout_s: float = 600.0
    num_processes: int = 1
    metrics: str = "ttft,tpot,itl,e2el"
    percentiles: str = "50,95,99"
    goodput: tuple[str, ...] = ()
    saves: bool = False
    detailed: bool = False
    reports: bool = False
    result_dir: Path = Path()
    result_filename: str | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("num-prompts", self.num_prompts), ("duration", self.duration_s)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
        if not 0 <= self.start_s < float("inf"):
            raise ValueError(f"trace-start is {self.start_s}; it must be 0 or more seconds")
        if self.start_s and self.trace is None and not self.servegen_clients:
            raise ValueError(f"trace-start is {self.start_s:g} without --trace or --servegen-client; leave it out")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max-model-len is {self.max_model_len}; it must be at least 2")
        if self.ramp is not None:
            self._check_ramp()
        if self.trace is not None and (self.lengths or self.servegen_clients):
            raise ValueError("a trace has its own requests; give either --trace, or --lengths and ServeGen clients")
        if self.trace is not None:
            self._check_trace()
        elif self.burstiness != 1.0 and self.request_rate == ("inf",) and self.ramp is None:
            raise ValueError(f"burstiness is {self.burstiness} of requests that all come at once; give --request-rate")

    def _check_trace(self) -> None:
        """What a trace has itself, and the flag that changes it."""
        given = {
            "request-rate": (self.request_rate, ("inf",), "--trace-speed"),
            "burstiness": (self.burstiness, 1.0, "--trace-speed"),
            "input-len": (self.input_len, ("128",), "--length-scale"),
            "output-len": (self.output_len, ("64",), "--length-scale"),
        }
        for name, (value, usual, instead) in given.items():
            if value != usual:
                raise ValueError(f"--{name} beside --trace, which has its own requests; use {instead}, or leave it out")

    def _check_ramp(self) -> None:
        if self.ramp not in ("linear", "exponential"):
            raise ValueError(f"ramp-up-strategy is {self.ramp!r}; it must be linear or exponential")
        if self.ramp_start_rps is None or self.ramp_end_rps is None or self.duration_s is None:
            raise ValueError("a ramp needs --ramp-up-start-rps, --ramp-up-end-rps and --duration")
        if self.trace is not None or self.servegen_clients:
            raise ValueError("a ramp sets the rates itself; leave out --trace and ServeGen clients")
