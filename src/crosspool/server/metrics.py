"""What requests went through, for Prometheus: histograms under `crosspool:` with vLLM's suffixes, by model_name.

Times come from the engine's own clock in the outputs, so the server's work is not in them. Gauges and counters of the
engine are read when Prometheus asks (`engine_metrics.py`).
"""

from collections import deque
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from crosspool.engine.output import RequestOutput

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SHORT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
RECENT_TOKENS = 512
RECENT_REQUESTS = 64
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class RequestMetrics:
    """Histograms of finished requests and of their tokens, on a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.ttft = self._histogram("time_to_first_token_seconds", "arrival to first token", _SECONDS)
        self.inter_token = self._histogram("inter_token_latency_seconds", "between two tokens", _SHORT_SECONDS)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "mean time between tokens of a request", _SHORT_SECONDS
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "arrival to last token", _SECONDS)
        self.queue_time = self._histogram("request_queue_time_seconds", "arrival to first prefill", _SECONDS)
        self.prefill_time = self._histogram("request_prefill_time_seconds", "first prefill to first token", _SECONDS)
        self.decode_time = self._histogram("request_decode_time_seconds", "first token to last token", _SECONDS)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "prompt tokens of a request", _TOKENS)
        self.generation_tokens = self._histogram("request_generation_tokens", "tokens a request generated", _TOKENS)
        self.rejections = Counter(
            "crosspool:admission_rejections",
            "requests that could not be taken",
            ("model_name", "reason"),
            registry=self.registry,
        )

        self.tasks = Gauge(
            "crosspool:server_tasks", "tasks of the server's event loop at this moment", registry=self.registry
        )
        self._recent: dict[str, deque[float]] = {}
        self._recent_ttft: dict[str, deque[float]] = {}

    def recent(self, model: str) -> deque[float]:
        """Times between the last tokens of a model, in seconds."""
        return self._recent.setdefault(model, deque(maxlen=RECENT_TOKENS))

    def recent_tbt(self) -> dict[str, dict[str, float]]:
        """Median and 99th percentile of the recent times between tokens, in seconds, by model that has some."""
        return _percentiles(self._recent)

    def recent_ttft(self) -> dict[str, dict[str, float]]:
        """The same of the last RECENT_REQUESTS times to a first token."""
        return _percentiles(self._recent_ttft)

    def saw_first_token(self, model: str, ttft_s: float) -> None:
        self.ttft.labels(model).observe(ttft_s)
        self._recent_ttft.setdefault(model, deque(maxlen=RECENT_REQUESTS)).append(ttft_s)

    def observer(self, model: str) -> "SequenceObserver":
        """Watches the outputs of one HTTP request."""
        return SequenceObserver(self, model)

    def refused(self, model: str, reason: str) -> None:
        self.rejections.labels(model, reason).inc()

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"crosspool:{name}", help_text, ("model_name",), registry=self.registry, buckets=buckets)


def _percentiles(recent: Mapping[str, deque[float]]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for model, times in recent.items():
        if ordered := sorted(times):
            found[model] = {
                "p50": ordered[len(ordered) // 2],
                "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
            }
    return found


class SequenceObserver:
    """Turns the outputs of one request's sequences into observations."""

    def __init__(self, metrics: RequestMetrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._inter_token = metrics.inter_token.labels(model)
        self._recent = metrics.recent(model)
        self._last_token_s: dict[tuple[int, int], float] = {}

    def observe(self, prompt: int, output: RequestOutput) -> None:
        key = (prompt, output.index)
        last = self._last_token_s.get(key)
        for moment in output.token_times_s:
            if last is not None:
                self._inter_token.observe(moment - last)
                self._recent.append(moment - last)
            elif output.timings.ttft_s is not None:
                self._metrics.saw_first_token(self._model, output.timings.ttft_s)
            last = moment
        if last is not None:
            self._last_token_s[key] = last
        if output.finish_reason is not None:
            self._finished(output)

    def _finished(self, output: RequestOutput) -> None:
        metrics, model, times = self._metrics, self._model, output.timings
        metrics.prompt_tokens.labels(model).observe(output.usage.prompt_tokens)
        metrics.generation_tokens.labels(model).observe(output.usage.completion_tokens)
        if times.queued_s is not None:
            metrics.queue_time.labels(model).observe(times.queued_s)
        if times.prefill_s is not None:
            metrics.prefill_time.labels(model).observe(times.prefill_s)
        if times.first_token_s is None or times.last_token_s is None:
            return
        decode_s = times.last_token_s - times.first_token_s
        metrics.e2e.labels(model).observe(times.last_token_s - times.arrival_s)
        metrics.decode_time.labels(model).observe(decode_s)
        if output.usage.completion_tokens > 1:
            metrics.per_token.labels(model).observe(decode_s / (output.usage.completion_tokens - 1))
