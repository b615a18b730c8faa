"""How long requests waited in the server's queues: from its /metrics, before and after the run.

The histogram `request_queue_time_seconds` is read under any prefix, so CrossPool and engines with its names are alike;
SGLang's is `queue_time_seconds`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

SUFFIX = "queue_time_seconds"


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueTimes:
    """One model's queueing. buckets: upper bounds in seconds (the last is infinite) and requests up to each."""

    num: float
    total_s: float
    buckets: tuple[tuple[float, float], ...]

    def since(self, before: "QueueTimes | None") -> "QueueTimes":
        if before is None:
            return self
        earlier = dict(before.buckets)
        buckets = tuple((bound, count - earlier.get(bound, 0.0)) for bound, count in self.buckets)
        return QueueTimes(num=self.num - before.num, total_s=self.total_s - before.total_s, buckets=buckets)

    def quantile_s(self, share: float) -> float:
        """Linear within its bucket; the last finite bound where it lies above all of them."""
        lower = below = 0.0
        for bound, count in self.buckets:
            if count >= share * self.num and count > below:
                if bound == float("inf"):
                    return lower
                return lower + (bound - lower) * (share * self.num - below) / (count - below)
            lower, below = (bound if bound != float("inf") else lower), count
        return lower

    def as_dict(self, most_s: float = float("inf")) -> dict[str, float]:
        """most_s: what no request can have waited longer than; quantiles of wide buckets may be above it."""
        return {
            "num": self.num,
            "mean_ms": 1e3 * self.total_s / self.num if self.num else 0.0,
            **{f"p{level}_ms": 1e3 * min(most_s, self.quantile_s(level / 100)) for level in (50, 95, 99)},
        }


def read_queue_times(metrics_text: str) -> dict[str, QueueTimes]:
    """By model name. CrossPool's own histogram is taken where it is shown under other names too."""
    families = [
        family
        for family in text_string_to_metric_families(metrics_text)
        if family.type == "histogram" and family.name.endswith(SUFFIX)
    ]
    families.sort(key=lambda family: not family.name.startswith("crosspool"))
    found: dict[str, QueueTimes] = {}
    for family in families[:1]:
        for model in {sample.labels.get("model_name", "") for sample in family.samples}:
            buckets: dict[float, float] = {}
            sums = {"count": 0.0, "sum": 0.0}
            for sample in family.samples:  # one series for each of an engine's ranks, where it has several
                if sample.labels.get("model_name", "") != model:
                    continue
                kind = sample.name.rsplit("_", 1)[1]
                if kind == "bucket":
                    bound = float(sample.labels["le"])
                    buckets[bound] = buckets.get(bound, 0.0) + sample.value
                elif kind in sums:
                    sums[kind] += sample.value
            found[model] = QueueTimes(num=sums["count"], total_s=sums["sum"], buckets=tuple(sorted(buckets.items())))
    return found


def queue_times_between(before: Mapping[str, QueueTimes], after: Mapping[str, QueueTimes]) -> dict[str, QueueTimes]:
    """What was observed between two readings; models without a request are left out."""
    between = {name: times.since(before.get(name)) for name, times in after.items()}
    return {name: times for name, times in between.items() if times.num > 0}
