"""`--metrics-compat vllm`: fourteen metrics also under vLLM's names, for boards and gateways that look for those."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

OURS = "crosspool:"
VLLM = "vllm:"

SHARED = frozenset(
    (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "num_preemptions",
        "prefix_cache_queries",
        "prefix_cache_hits",
    )
)
"""Families, without `_total`, that mean the same in both."""


class VllmNames(Collector):
    """The shared families of another registry under vLLM's prefix, with its label `engine`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            if family.name.removeprefix(OURS) not in SHARED:
                continue
            renamed = Metric(_rename(family.name), family.documentation, family.type)
            renamed.samples = [
                sample._replace(name=_rename(sample.name), labels={**sample.labels, "engine": "0"})
                for sample in family.samples
            ]
            yield renamed


def vllm_registry(registry: CollectorRegistry) -> CollectorRegistry:
    """A registry of its own, so that asking it collects the other one once."""
    found = CollectorRegistry(auto_describe=False)
    found.register(VllmNames(registry))
    return found


def _rename(name: str) -> str:
    return VLLM + name.removeprefix(OURS)
