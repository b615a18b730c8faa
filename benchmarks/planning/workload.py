"""Workloads that the planner's benchmark and tables share: random loads, and a composed day of 300 models."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from crosspool.planner.demand import ModelLoad
from crosspool.planner.holding import Holding
from crosspool.planner.request_table import SteadySpeed, table_from_lengths
from crosspool.workload.arrivals import Poisson
from crosspool.workload.lengths import Lognormal

WINDOW_S, DAY_S = 600, 86400
BIN_EDGES = [round(2 ** (exponent / 4)) for exponent in range(12, 61)]  # 8 to 32768 tokens
NAMES = ("granite-3.1-1b-a400m", "olmoe-1b-7b")


def random_loads(seed: int, num_models: int = 3) -> list[ModelLoad]:
    """Poisson loads of random rates, lengths, speeds and KV sizes; about 4 live requests each."""
    loads = []
    for idx in range(num_models):
        rng = np.random.default_rng([seed, idx])
        lengths = Lognormal(
            prompt_mean=float(rng.uniform(200, 6000)),
            output_mean=float(rng.uniform(50, 1500)),
            prompt_cv=float(rng.uniform(0.3, 2.0)),
            output_cv=float(rng.uniform(0.3, 1.5)),
            correlation=float(rng.uniform(-0.5, 0.8)),
            longest=60000,
        )
        speed = SteadySpeed(tbt_s=float(rng.uniform(0.01, 0.08)), prefill_tokens_per_s=float(rng.uniform(500, 20000)))
        requests = table_from_lengths(lengths, speed, rng)
        kv_bytes = int(rng.integers(20_000, 250_000))
        holding = Holding(policy="forecast", kv_bytes_per_token=kv_bytes, page_tokens=256, page_bytes=256 * kv_bytes)
        arrivals = Poisson(rate_rps=float(rng.uniform(2, 6)) / requests.mean_service_s)
        loads.append(ModelLoad(name=f"m{idx}", arrivals=arrivals, requests=requests, holding=holding))
    return loads


def write_composed_day(folder: Path, num_models: int, total_rps: float, seed: int) -> Path:
    """A plan input in `folder`: cold models of Zipf popularity whose clients are silent most of the day and bursty.

    Shaped like published per-client statistics: the busiest is active all day, the median in a sixth of its windows;
    window rates are log-normal, coefficients of variation of arrivals have median 1.2; outputs and prompts log-normal.
    """
    rng = np.random.default_rng(seed)
    popularity = 1.0 / np.arange(1, num_models + 1) ** 0.9
    rates = total_rps * popularity / popularity.sum()
    with (folder / "rates.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("client", "t_s", "rate_rps", "cv"))
        for client in range(num_models):
            active = rng.random(DAY_S // WINDOW_S) < max(0.17, 1.0 - client / 20)
            active[rng.integers(len(active))] = True
            for window in np.flatnonzero(active):
                rate, cv = rng.lognormal(0.0, 0.7), rng.lognormal(0.2, 0.6)
                writer.writerow((client, int(window) * WINDOW_S, f"{rate:.5f}", f"{cv:.3f}"))
    clients = {
        str(client): {"input": {"hist": _histogram(rng, 500, 2500)}, "output": {"hist": _histogram(rng, 200, 1200)}}
        for client in range(num_models)
    }
    (folder / "lengths.json").write_text(json.dumps({"bin_edges": BIN_EDGES, "clients": clients}), encoding="utf-8")
    models = [
        {
            "model": NAMES[client % 60 == 59],
            "name": f"cold-{client}",
            "rate": float(rates[client]),
            "servegen": {"rates": "rates.csv", "lengths": "lengths.json", "client": client},
        }
        for client in range(num_models)
    ]
    given: dict[str, Any] = {
        "gpus": {"kind": "h200", "count": 8, "kv": 1},
        "models": models,
        "service": {"cost": "steady", "tbt_ms": 10},
        "quantile": 0.99,
        "precision": 0.01,
        "seed": seed,
    }
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(given, sort_keys=False), encoding="utf-8")
    return path


def _histogram(rng: np.random.Generator, low: float, high: float) -> list[list[float]]:
    """Log-normal weights over the bins, with a median between `low` and `high` tokens."""
    centre, width = np.log(rng.uniform(low, high)), 0.8
    middles = np.log(np.sqrt(np.array(BIN_EDGES[:-1]) * np.array(BIN_EDGES[1:])))
    weights = np.exp(-(((middles - centre) / width) ** 2) / 2)
    return [[idx, float(weight)] for idx, weight in enumerate(weights / weights.sum()) if weight > 1e-6]
