"""Small loads for planner tests: tables of requests and models with chosen numbers."""

from __future__ import annotations

import numpy as np

from crosspool.planner.demand import ModelLoad
from crosspool.planner.holding import Holding
from crosspool.planner.request_table import RequestTable, SteadySpeed, table_from_lengths
from crosspool.workload.arrivals import ArrivalProcess, Poisson
from crosspool.workload.lengths import Lognormal

KV_BYTES = 1000
PAGE_TOKENS = 16


def table(prompt, output, service, max_tokens=None) -> RequestTable:
    """Rows from plain lists."""
    output = np.asarray(output, dtype=np.int64)
    return RequestTable(
        prompt_tokens=np.asarray(prompt, dtype=np.int64),
        output_tokens=output,
        max_tokens=output if max_tokens is None else np.asarray(max_tokens, dtype=np.int64),
        service_s=np.asarray(service, dtype=np.float64),
    )


def holding(policy="forecast", kv_bytes=KV_BYTES, page_tokens=PAGE_TOKENS, state_bytes=0) -> Holding:
    return Holding(
        policy=policy,
        kv_bytes_per_token=kv_bytes,
        page_tokens=page_tokens,
        page_bytes=page_tokens * kv_bytes,
        state_bytes=state_bytes,
    )


def random_table(seed: int, num_rows: int = 4096) -> RequestTable:
    """Correlated lengths, and service times that follow the output."""
    rng = np.random.default_rng(seed)
    lengths = Lognormal(
        prompt_mean=float(rng.uniform(100, 4000)),
        output_mean=float(rng.uniform(50, 1500)),
        prompt_cv=float(rng.uniform(0.3, 2.0)),
        output_cv=float(rng.uniform(0.3, 1.5)),
        correlation=float(rng.uniform(-0.5, 0.8)),
        longest=60000,
    )
    speed = SteadySpeed(tbt_s=float(rng.uniform(0.01, 0.08)), prefill_tokens_per_s=float(rng.uniform(500, 20000)))
    return table_from_lengths(lengths, speed, rng, num_rows=num_rows)


def load(requests: RequestTable, arrivals: ArrivalProcess | float = 0.5, name="model", **held) -> ModelLoad:
    process = Poisson(rate_rps=arrivals) if isinstance(arrivals, int | float) else arrivals
    return ModelLoad(name=name, arrivals=process, requests=requests, holding=holding(**held))
