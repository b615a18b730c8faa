"""The requests of a simulation: a trace's rows, or drawn arrivals and lengths, for any stretch of time."""

from collections.abc import Iterator, Sequence
from zlib import crc32

import numpy as np

from crosspool.planner.traffic import PlannedModel
from crosspool.simulator.driver import SimulatedRequest
from crosspool.workload.arrivals import RecordedArrivals


def group_requests(
    models: Sequence[PlannedModel], *, start_s: float, stop_s: float, seed: int
) -> list[SimulatedRequest]:
    """Requests of all models that arrive in [start_s, stop_s), by arrival, on a clock that starts at `start_s`."""
    found: list[SimulatedRequest] = []
    for model in models:
        found += _model_requests(model, start_s, stop_s, seed)
    return sorted(found, key=lambda request: request.arrival_s)


def _model_requests(model: PlannedModel, start_s: float, stop_s: float, seed: int) -> Iterator[SimulatedRequest]:
    if model.arrivals is None or model.requests is None:
        return
    rng = np.random.default_rng([seed, crc32(model.name.encode())])
    if isinstance(model.arrivals, RecordedArrivals):
        times, rows = model.arrivals.indexed(start_s, stop_s)
    else:
        times = model.arrivals.draw(rng, start_s, stop_s)
        rows = rng.integers(0, model.requests.num_rows, len(times))
    requests = model.requests
    columns = (requests.prompt_tokens[rows], requests.output_tokens[rows], requests.max_tokens[rows])
    for arrival, prompt, output, asked in zip(
        (times - start_s).tolist(), *(column.tolist() for column in columns), strict=True
    ):
        yield SimulatedRequest(arrival, model.name, max(1, prompt), max(1, output), max(1, asked))
