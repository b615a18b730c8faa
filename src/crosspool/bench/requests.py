"""From settings to the list of requests: a trace, ServeGen clients, or rates and lengths."""

from collections.abc import Mapping, Sequence

import numpy as np

from crosspool.bench.by_model import (
    arrivals,
    by_model,
    check_burstiness,
    lengths,
    parse_length,
    parse_rate,
    recorded_lengths,
)
from crosspool.bench.settings import BenchSettings
from crosspool.bench.traffic import ModelTraffic, PlannedRequest, drawn_requests, traced_requests
from crosspool.workload.arrivals import ArrivalProcess, Ramp
from crosspool.workload.formats.servegen import ServeGenClient, read_servegen
from crosspool.workload.lengths import Lengths
from crosspool.workload.traces import read_trace

ALL_AT_ONCE = ("inf",)
"""The rate where none is asked for."""

NUM_PROMPTS = 100
"""Of each model, where neither their number nor a duration is given."""


def planned_requests(settings: BenchSettings, models: Sequence[str]) -> list[PlannedRequest]:
    """Raises ValueError, naming flag, value and remedy, for what cannot be sent."""
    check_burstiness(settings.burstiness)
    if settings.trace is not None:
        return _traced(settings, models)
    rates = by_model("request-rate", settings.request_rate, models, parse_rate)
    pairs = _lengths(settings, models)
    clients = _clients(settings, models)
    paced = {*clients} if clients and settings.request_rate == ALL_AT_ONCE else {*rates, *clients}
    unpaced = [name for name in models if name not in paced]
    if unpaced and len(unpaced) < len(models) and settings.ramp is None:
        raise ValueError(
            f"{unpaced[0]} has no rate, and its requests would come all at once beside the others'; give a "
            "--request-rate for it or for all, or name those that are asked with --model"
        )
    num = settings.num_prompts
    traffic = []
    for name in models:
        rate = rates.get(name, float("inf"))
        process = arrivals(rate, settings.burstiness) if settings.ramp is None else _ramp(settings)
        if name in clients:
            own = clients[name].arrivals
            process = own.scaled(rate / own.rate_rps) if rate != float("inf") else own
        if num is None and (settings.duration_s is None or process is None):
            num = NUM_PROMPTS
        traffic.append(
            ModelTraffic(
                model=name,
                arrivals=process,
                lengths=clients.get(name, pairs[name]),
                num_prompts=num,
                duration_s=settings.duration_s,
                start_s=settings.start_s if name in clients else 0.0,
            )
        )
    planned = drawn_requests(traffic, settings.seed, settings.max_model_len)
    if not planned:
        elsewhere = ", or --trace-start, since ServeGen's clients are silent for most of a day" if clients else ""
        raise ValueError(
            f"no request arrives in that time; give a longer --duration or a higher --request-rate{elsewhere}"
        )
    return planned


def _traced(settings: BenchSettings, models: Sequence[str]) -> list[PlannedRequest]:
    assert settings.trace is not None
    trace = read_trace(settings.trace, settings.trace_format, settings.trace_model)
    if settings.start_s:
        if settings.start_s > trace.duration_s:
            raise ValueError(f"trace-start is {settings.start_s:g}, but the trace lasts {trace.duration_s:g} s")
        trace = trace.window(settings.start_s, float("inf"))
    names = {}
    for word in settings.trace_names:
        old, found, new = word.partition("=")
        if not found or old not in trace.models:
            raise ValueError(f"--trace-name is {word!r}; give OLD=NEW with one of {', '.join(trace.models[:20])}")
        names[old] = new
    trace = trace.renamed(names)
    unserved = [index for index, name in enumerate(trace.models) if name not in models]
    if settings.skips_unserved:
        trace = trace.where(~np.isin(trace.model, unserved))
    elif unserved:
        name, more = trace.models[unserved[0]], len(unserved) - 1
        raise ValueError(
            f"the trace has requests of {name!r}{f' and {more} more models' if more else ''}, not served here; map "
            f"names with --trace-name {name}={models[0]}, or leave such requests out with --trace-skip-unserved"
        )
    planned = traced_requests(
        trace,
        speed=settings.trace_speed,
        length_scale=settings.length_scale,
        duration_s=settings.duration_s,
        max_tokens=settings.max_model_len,
    )
    return planned if settings.num_prompts is None else planned[: settings.num_prompts]


def _ramp(settings: BenchSettings) -> ArrivalProcess:
    """Of each model. `BenchSettings` has checked that everything is there."""
    assert settings.ramp_start_rps is not None
    assert settings.ramp_end_rps is not None
    assert settings.duration_s is not None
    return Ramp(
        start_rps=settings.ramp_start_rps,
        end_rps=settings.ramp_end_rps,
        duration_s=settings.duration_s,
        is_exponential=settings.ramp == "exponential",
        cv=settings.burstiness**-0.5,
    )


def _lengths(settings: BenchSettings, models: Sequence[str]) -> Mapping[str, Lengths]:
    prompts = by_model("input-len", ("128", *settings.input_len), models, parse_length)
    outputs = by_model("output-len", ("64", *settings.output_len), models, parse_length)
    tables = by_model("lengths", settings.lengths, models, recorded_lengths)
    return {name: tables.get(name) or lengths(prompts[name], outputs[name]) for name in models}


def _clients(settings: BenchSettings, models: Sequence[str]) -> Mapping[str, ServeGenClient]:
    if not settings.servegen_clients:
        return {}
    if settings.servegen_rates is None or settings.servegen_lengths is None:
        raise ValueError("--servegen-client needs --servegen-rates FILE and --servegen-lengths FILE")
    known = {client.client: client for client in read_servegen(settings.servegen_rates, settings.servegen_lengths)}

    def parse(text: str) -> ServeGenClient:
        if not text.isdigit() or int(text) not in known:
            raise ValueError(f"there is no such client; there are {', '.join(map(str, sorted(known)[:20]))}")
        return known[int(text)]

    return by_model("servegen-client", settings.servegen_clients, models, parse)
