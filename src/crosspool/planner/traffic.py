"""From the plan's input to loads: whose requests come when, and what each of them holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from zlib import crc32

import numpy as np

from crosspool.config import AdmissionPolicy
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.planner.catalogue import lookup, model_facts
from crosspool.planner.demand import ModelLoad
from crosspool.planner.deployment import LengthsFrom, ModelEntry, PlanInput, ServeGenFrom
from crosspool.planner.facts import ModelFacts
from crosspool.planner.holding import Holding
from crosspool.planner.request_table import RequestTable, SteadySpeed, table_from_lengths, table_from_trace
from crosspool.planner.service import Traffic
from crosspool.workload.arrivals import ArrivalProcess, GammaBursts, Poisson, RecordedArrivals
from crosspool.workload.formats.plain import read_table
from crosspool.workload.formats.servegen import ServeGenClient, read_servegen
from crosspool.workload.lengths import Lengths, Lognormal, Recorded
from crosspool.workload.trace import Trace
from crosspool.workload.traces import read_trace

UNSERVED = SteadySpeed(tbt_s=1.0)
"""Stands where a speed will be put once it is known."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedModel:
    """One model of the input: facts, page geometry and, where it has load, arrivals and requests.

    has_recorded_service: the trace says how long requests stayed; no cost model changes that.
    """

    entry: ModelEntry
    facts: ModelFacts
    geometry: PageGeometry
    arrivals: ArrivalProcess | None = None
    requests: RequestTable | None = None
    has_recorded_service: bool = False

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def rate_rps(self) -> float:
        return self.arrivals.rate_rps if self.arrivals is not None else 0.0

    def load(self, policy: AdmissionPolicy, speed: SteadySpeed | None = None) -> ModelLoad | None:
        """The load at a speed (None: as recorded); None for a model without requests."""
        if self.arrivals is None or self.requests is None:
            return None
        holding = Holding(
            policy=policy,
            kv_bytes_per_token=self.facts.kv_bytes_per_token,
            page_tokens=self.geometry.page_tokens,
            page_bytes=self.geometry.page_bytes,
            state_bytes=self.facts.state_bytes,
        )
        keeps = speed is None or self.has_recorded_service
        requests = self.requests if keeps or speed is None else self.requests.with_service(speed)
        return ModelLoad(name=self.name, arrivals=self.arrivals, requests=requests, holding=holding)

    def traffic(self) -> Traffic | None:
        if self.arrivals is None or self.requests is None or self.rate_rps == 0:
            return None
        return Traffic(facts=self.facts, rate_rps=self.rate_rps, requests=self.requests)


def planned_models(plan_input: PlanInput) -> list[PlannedModel]:
    """Every model of the input with its load, in order. Raises ValueError for names that clash or are unknown."""
    facts = [_facts(entry) for entry in plan_input.models]
    names = [item.name for item in facts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        first, second, *_ = (entry.model for entry, name in zip(plan_input.models, names, strict=True) if name == twice)
        raise ValueError(f"two models are called {twice!r}: {first} and {second}; give one of them another `name:`")
    recorded = _recorded(plan_input, names)
    models = []
    for entry, item in zip(plan_input.models, facts, strict=True):
        geometry = item.geometry(plan_input.engine.frame_bytes, entry.page_tokens)
        model = PlannedModel(entry=entry, facts=item, geometry=geometry)
        if item.name in recorded:
            if entry.rate or entry.servegen is not None:
                raise ValueError(f"{item.name} has a load of its own and is in the trace too; remove one of them")
            model = _with_trace(model, recorded[item.name], plan_input)
        elif entry.servegen is not None:
            model = _with_client(model, entry.servegen, plan_input.seed)
        elif entry.rate:
            model = _with_rate(model, entry, plan_input.seed)
        models.append(model)
    return models


def _facts(entry: ModelEntry) -> ModelFacts:
    facts = model_facts(entry.model, entry.name)
    if entry.context > facts.max_context:
        raise ValueError(
            f"context {entry.context} is guaranteed for {facts.name}, whose own limit is {facts.max_context} tokens; "
            f"set context: {facts.max_context} or less"
        )
    return facts


def stand_ins(models: Sequence[PlannedModel]) -> dict[str, str]:
    """Models whose figures are those of another, by name: catalogue names that are only near."""
    near = {model.name: lookup(model.entry.model) for model in models}
    return {name: found.entry for name, found in near.items() if found is not None and not found.is_exact}


def _recorded(plan_input: PlanInput, names: Sequence[str]) -> Mapping[str, Trace]:
    if plan_input.trace is None:
        return {}
    trace = read_trace(plan_input.trace.file, plan_input.trace.format, plan_input.trace.model)
    trace = trace.renamed(plan_input.trace.names)
    if unknown := [name for name in trace.models if name not in names]:
        raise ValueError(
            f"the trace has requests of {unknown[0]}, which is not planned; "
            f"add it to models:, or map it in trace: names: {{{unknown[0]}: {names[0]}}}"
        )
    return {name: trace.of_model(name) for name in trace.models}


def _with_trace(model: PlannedModel, trace: Trace, plan_input: PlanInput) -> PlannedModel:
    assert plan_input.trace is not None
    period = plan_input.trace.period or trace.duration_s
    if period <= 0:
        raise ValueError(
            "all requests of the trace arrive at once; give trace: {period: SECONDS} until they come again"
        )
    if period < trace.duration_s:
        raise ValueError(f"the trace lasts {trace.duration_s:.0f} s, longer than period {period:g}; give a longer one")
    return replace(
        model,
        arrivals=RecordedArrivals(times_s=trace.arrival_s, period_s=period),
        requests=table_from_trace(trace, UNSERVED, max_tokens=model.entry.max_tokens),
        has_recorded_service=trace.has_service_times,
    )


def _with_client(model: PlannedModel, source: ServeGenFrom, seed: int) -> PlannedModel:
    clients = _clients(source.rates, source.lengths)
    if source.client not in clients:
        known = ", ".join(map(str, sorted(clients)[:20]))
        raise ValueError(f"{source.rates} and {source.lengths} have no client {source.client}; they have {known}")
    client = clients[source.client]
    arrivals = client.arrivals
    if model.entry.rate:
        arrivals = arrivals.scaled(model.entry.rate / arrivals.rate_rps)
    rng = np.random.default_rng([seed, crc32(model.name.encode())])
    return replace(
        model,
        arrivals=arrivals,
        requests=table_from_lengths(client, UNSERVED, rng, max_tokens=model.entry.max_tokens),
    )


@lru_cache(maxsize=8)
def _clients(rates: Path, lengths: Path) -> dict[int, ServeGenClient]:
    return {client.client: client for client in read_servegen(rates, lengths)}


def _with_rate(model: PlannedModel, entry: ModelEntry, seed: int) -> PlannedModel:
    assert entry.lengths is not None
    rng = np.random.default_rng([seed, crc32(model.name.encode())])
    requests = table_from_lengths(_lengths(entry.lengths), UNSERVED, rng, max_tokens=entry.max_tokens)
    arrivals: ArrivalProcess = Poisson(rate_rps=entry.rate)
    if entry.cv != 1.0:
        arrivals = GammaBursts(rate_rps=entry.rate, cv=entry.cv)
    return replace(model, arrivals=arrivals, requests=requests)


def _lengths(source: LengthsFrom) -> Lengths:
    if source.file is not None:
        table = read_table(source.file)
        return Recorded(
            prompt_tokens=np.asarray(table.prompt_tokens, dtype=np.int64),
            output_tokens=np.asarray(table.output_tokens, dtype=np.int64),
        )
    assert source.prompt is not None
    assert source.output is not None
    return Lognormal(
        prompt_mean=source.prompt,
        output_mean=source.output,
        prompt_cv=source.prompt_cv,
        output_cv=source.output_cv,
        correlation=source.correlation,
        longest=source.longest,
    )
