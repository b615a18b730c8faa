"""ServeGen clients: 10-minute windows of rate and burstiness, and length histograms, for each client of a service.

Not a recording but a generator: requests are drawn. Lengths of prompt and output are marginals there, so the pairing of
a drawn prompt with a drawn output is ours (independent), not the service's.
"""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from crosspool.workload.arrivals import RateWindow, WindowedBursts
from crosspool.workload.lengths import Pairs
from crosspool.workload.text import open_text, seconds
from crosspool.workload.trace import FloatColumn, IntColumn, Trace, make_trace

WINDOW_S = 600.0
DAY_S = 86400.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Histogram:
    """Token counts in bins: bin `bins[i]` covers [edges[b], edges[b + 1]) and has probability `probability[i]`."""

    edges: FloatColumn
    bins: IntColumn
    probability: FloatColumn

    def draw(self, rng: np.random.Generator, num: int) -> IntColumn:
        chosen = rng.choice(self.bins, num, p=self.probability)
        low = self.edges[chosen]
        high = self.edges[np.minimum(chosen + 1, len(self.edges) - 1)]
        drawn: IntColumn = np.maximum(1, np.floor(low + (high - low) * rng.random(num))).astype(np.int64)
        return drawn


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ServeGenClient:
    """One customer of a service: a good stand-in for one cold model. It is a Lengths; `arrivals` is its process."""

    client: int
    arrivals: WindowedBursts
    prompt: Histogram
    output: Histogram

    def draw(self, rng: np.random.Generator, num: int) -> Pairs:
        return self.prompt.draw(rng, num), self.output.draw(rng, num)

    def trace(self, rng: np.random.Generator, model: str, *, rate_rps: float | None = None) -> Trace:
        """One period of requests, at the client's own mean rate or scaled to `rate_rps`."""
        own = self.arrivals.rate_rps
        arrivals = self.arrivals if rate_rps is None else self.arrivals.scaled(rate_rps / own)
        times = arrivals.draw(rng, 0.0, arrivals.period_s)
        prompt, output = self.draw(rng, len(times))
        return make_trace(times, np.zeros(len(times)), prompt, output, models=(model,), duration_s=arrivals.period_s)


def read_servegen(rates: Path, lengths: Path) -> list[ServeGenClient]:
    """The clients that have both rates and lengths, busiest first. Raises ValueError naming file, line and value."""
    with open_text(lengths) as file:
        try:
            data = json.load(file)
            edges = np.array(data["bin_edges"], dtype=np.float64)
            histograms = {
                int(client): (_histogram(edges, both["input"]["hist"]), _histogram(edges, both["output"]["hist"]))
                for client, both in data["clients"].items()
            }
        except (json.JSONDecodeError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{lengths} is not a ServeGen length file with bin_edges and clients ({error})") from None
    windows = _read_windows(rates)
    last = max((window.start_s for client in windows.values() for window in client), default=0.0)
    period = DAY_S * (last // DAY_S + 1)
    clients = [
        ServeGenClient(
            client=client,
            arrivals=WindowedBursts(windows=tuple(windows[client]), window_s=WINDOW_S, period_s=period),
            prompt=prompt,
            output=output,
        )
        for client, (prompt, output) in histograms.items()
        if client in windows
    ]
    if not clients:
        raise ValueError(f"{rates} and {lengths} have no client in common")
    return sorted(clients, key=lambda client: (-client.arrivals.rate_rps, client.client))


def _histogram(edges: FloatColumn, pairs: list[list[float]]) -> Histogram:
    weights = np.array([weight for _, weight in pairs], dtype=np.float64)
    return Histogram(
        edges=edges, bins=np.array([idx for idx, _ in pairs], dtype=np.int64), probability=weights / weights.sum()
    )


def _read_windows(path: Path) -> dict[int, list[RateWindow]]:
    windows: dict[int, list[RateWindow]] = {}
    with open_text(path) as file:
        reader = csv.DictReader(file)
        if missing := {"client", "t_s", "rate_rps", "cv"} - set(reader.fieldnames or ()):
            raise ValueError(
                f"{path} has no column {sorted(missing)[0]}; a ServeGen rate file has client, t_s, rate_rps, cv"
            )
        for row in reader:
            where = f"{path}:{reader.line_num}: "
            window = RateWindow(
                start_s=seconds(row["t_s"], where + "t_s"),
                rate_rps=seconds(row["rate_rps"], where + "rate_rps"),
                cv=max(0.05, seconds(row["cv"], where + "cv")),
            )
            windows.setdefault(int(seconds(row["client"], where + "client")), []).append(window)
    return {client: sorted(rows, key=lambda window: window.start_s) for client, rows in windows.items()}
