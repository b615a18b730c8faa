"""Which requests are sent when: from rates and lengths, or from a trace, to one list in order of time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from crosspool.workload.arrivals import ArrivalProcess
from crosspool.workload.lengths import Lengths
from crosspool.workload.trace import FloatColumn, Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRequest:
    """One request to send. due_s counts from the start of the run; index is its place in the list and its seed."""

    index: int
    due_s: float
    model: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTraffic:
    """Requests of one model: `num_prompts` of them, or all that arrive in `duration_s`.

    arrivals None: all are due at once, which together with a bound on concurrency is a closed loop. start_s: on the
    clock of the arrivals, the moment at which the run begins.
    """

    model: str
    arrivals: ArrivalProcess | None
    lengths: Lengths
    num_prompts: int | None = None
    duration_s: float | None = None
    start_s: float = 0.0

    def __post_init__(self) -> None:
        if self.num_prompts is None and (self.duration_s is None or self.arrivals is None):
            raise ValueError(f"no end to the requests of {self.model}; give --num-prompts, or a rate and --duration")


def drawn_requests(traffic: Sequence[ModelTraffic], seed: int, max_tokens: int | None = None) -> list[PlannedRequest]:
    """The requests of all models. A model's own do not change with the models beside it.

    max_tokens: as of `traced_requests`.
    """
    rows: list[tuple[float, str, int, int]] = []
    for own in traffic:
        rng = np.random.default_rng([seed, crc32(own.model.encode())])
        times = _times(own, rng)
        prompts, outputs = own.lengths.draw(rng, len(times))
        for due, prompt, output in zip(times.tolist(), prompts.tolist(), outputs.tolist(), strict=True):
            rows.append((due, own.model, *_within(prompt, output, max_tokens)))
    return _in_order(rows)


def traced_requests(
    trace: Trace,
    *,
    speed: float = 1.0,
    length_scale: float = 1.0,
    duration_s: float | None = None,
    max_tokens: int | None = None,
) -> list[PlannedRequest]:
    """The requests of a trace, `speed` times as fast, lengths times `length_scale`, as far as `duration_s` of the run.

    max_tokens: the most tokens of prompt and output together; longer prompts are cut. Raises ValueError for what is
    not above 0.
    """
    for name, value in (("trace speed", speed), ("length scale", length_scale)):
        if not value > 0:
            raise ValueError(f"{name} is {value}; it must be above 0")
    rows = []
    for arrival, model, prompt, output in trace.rows():
        due = arrival / speed
        if duration_s is not None and due >= duration_s:
            break
        prompt, output = max(1, round(prompt * length_scale)), max(1, round(output * length_scale))
        rows.append((due, model, *_within(prompt, output, max_tokens)))
    if not rows:
        raise ValueError("the trace has no request in the time asked for; give a longer --duration")
    return _in_order(rows)


def realised_rates(requests: Sequence[PlannedRequest], duration_s: float | None = None) -> Mapping[str, float]:
    """Requests per second of each model over `duration_s`, else to its own last one; 0 where all are due at once."""
    due: dict[str, list[float]] = {name: [] for name in sorted({request.model for request in requests})}
    for request in requests:
        due[request.model].append(request.due_s)
    return {name: len(times) / span if (span := duration_s or max(times)) else 0.0 for name, times in due.items()}


def _within(prompt_tokens: int, output_tokens: int, max_tokens: int | None) -> tuple[int, int]:
    """At most `max_tokens` together; the answer is cut only where a prompt of one token leaves it no room."""
    if max_tokens is None:
        return prompt_tokens, output_tokens
    output_tokens = min(output_tokens, max_tokens - 1)
    return min(prompt_tokens, max_tokens - output_tokens), output_tokens


def _times(own: ModelTraffic, rng: np.random.Generator) -> FloatColumn:
    if own.arrivals is None:
        return np.zeros(own.num_prompts or 0)
    if own.num_prompts is None:
        return own.arrivals.draw(rng, own.start_s, own.start_s + (own.duration_s or 0.0)) - own.start_s
    rate = own.arrivals.rate_rps
    if rate <= 0:
        raise ValueError(f"the rate of {own.model} is {rate}; it must be above 0 to send {own.num_prompts} requests")
    times, horizon = np.empty(0), own.start_s
    while len(times) < own.num_prompts:  # stretch by stretch, so that what is drawn does not depend on its number
        stop = horizon + own.num_prompts / rate
        times, horizon = np.concatenate((times, own.arrivals.draw(rng, horizon, stop))), stop
    times = times[: own.num_prompts] - own.start_s
    return times if own.duration_s is None else times[times < own.duration_s]


def _in_order(rows: list[tuple[float, str, int, int]]) -> list[PlannedRequest]:
    rows.sort(key=lambda row: row[0])
    return [
        PlannedRequest(index=index, due_s=due, model=model, prompt_tokens=prompt, output_tokens=output)
        for index, (due, model, prompt, output) in enumerate(rows)
    ]
