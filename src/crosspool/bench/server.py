"""What is asked of the server around a run: its models, a warm-up, its queue times."""

import asyncio
import logging
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from crosspool.bench.client import LoadSettings, run_load
from crosspool.bench.server_times import QueueTimes, read_queue_times
from crosspool.bench.target import Target
from crosspool.bench.traffic import PlannedRequest
from crosspool.errors import CrossPoolError
from crosspool.server_client import ServerClient

logger = logging.getLogger(__name__)

METRICS_TIMEOUT_S = 10.0


def listed_models(base_url: str, api_key: str | None) -> tuple[str, ...]:
    """Every served name. Raises CrossPoolError where no server answers or it has no model."""
    cards = ServerClient(base_url, api_key).get("/v1/models")
    names = tuple(str(card["id"]) for card in cards["data"])
    if not names:
        raise CrossPoolError(f"the server at {base_url} has no model; load one first")
    return names


def warm_up(planned: Sequence[PlannedRequest], targets: Mapping[str, Target], num: int, timeout_s: float) -> None:
    """The first `num` requests of each model, one after another. Raises CrossPoolError with the first failure."""
    settings = LoadSettings(max_concurrency=1, timeout_s=timeout_s)
    requests = warm_up_requests(planned, num)
    run = asyncio.run(run_load(requests, targets, settings, [0, 0, 0, 0]))
    for record in run.records:
        if record.outcome != "served":
            raise CrossPoolError(f"the warm-up request of {record.model} was not served: {record.error}")


def warm_up_requests(planned: Sequence[PlannedRequest], num: int) -> list[PlannedRequest]:
    """The first `num` requests of each model in length, due at once.

    Their numbers are others, so their prompts are too: those that are measured must not be in a prefix cache.
    """
    by_model: dict[str, list[PlannedRequest]] = {}
    for request in planned:
        own = by_model.setdefault(request.model, [])
        if len(own) < num:
            own.append(replace(request, index=-1 - len(own), due_s=0.0))
    return [request for own in by_model.values() for request in own]


def read_queues(base_urls: Iterable[str], api_key: str | None) -> dict[str, QueueTimes]:
    """Queue times so far by model; none of servers that show no metrics, or a page of another kind in their place."""
    return {name: times for url in sorted(set(base_urls)) for name, times in _queues_of(url, api_key).items()}


def _queues_of(base_url: str, api_key: str | None) -> dict[str, QueueTimes]:
    address = base_url.rstrip("/").removesuffix("/v1") + "/metrics"
    request = urllib.request.Request(address)
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=METRICS_TIMEOUT_S) as answer:
            text = answer.read().decode("utf-8")
    except (urllib.error.URLError, OSError):
        return {}
    try:
        return read_queue_times(text)
    except ValueError as error:
        logger.warning("%s is no page of metrics, so queue times are left out: %s", address, error)
        return {}
