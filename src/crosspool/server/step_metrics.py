"""Where steps spend their time and what they move, read from the engine's snapshot when Prometheus asks.

attention_seconds, ffn_seconds and transfer_seconds are sums and counts over steps, by model and phase: what the KV rank
computed, what the weights rank that worked longest computed, and what the KV rank waited beyond that. A backend that
does not tell the last two apart has neither.
"""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, SummaryMetricFamily

from crosspool.engine.stats import EngineStats, ModelInfo, StepTotals

LABELS = ("model_name", "phase")


def step_times(stats: EngineStats) -> Iterator[SummaryMetricFamily]:
    attention = _summary("attention_seconds", "time a step computed on its KV rank")
    ffn = _summary("ffn_seconds", "time a step computed on the weights rank that worked longest for it")
    transfer = _summary("transfer_seconds", "time a step's KV rank waited beyond the FFN's own: crossings and turns")
    tokens = _summary("iteration_tokens_total", "tokens of a step")
    for model in stats.models:
        for phase, totals in model.steps.items():
            labels = [model.name, phase]
            attention.add_metric(labels, totals.num_steps, totals.attention_s)
            tokens.add_metric(labels, totals.num_steps, totals.num_tokens)
            if totals.num_told:
                ffn.add_metric(labels, totals.num_told, totals.ffn_s)
                transfer.add_metric(labels, totals.num_told, totals.transfer_s)
    yield from (attention, ffn, transfer, tokens)


def moved(stats: EngineStats, models: Sequence[ModelInfo]) -> Iterator[CounterMetricFamily]:
    """Tokens that went to experts, and weights that went into memory."""
    experts = CounterMetricFamily(
        "crosspool:expert_tokens",
        "pairs of a token and an expert it went to, by MoE layer, of all steps that ended",
        labels=("model_name", "layer"),
    )
    run = {model.name: _num_tokens(model.steps.values()) for model in stats.models}
    weights = CounterMetricFamily(
        "crosspool:weight_bytes_moved",
        "weights read into the ranks' memory since the model was added, again after a loss included",
        labels=("model_name",),
    )
    for info in models:
        weights.add_metric([info.name], info.moved_bytes)
        for layer, num_experts in enumerate(info.experts_by_layer):
            if num_experts:
                experts.add_metric([info.name, str(layer)], num_experts * run.get(info.name, 0))
    yield from (experts, weights)


def _num_tokens(totals: Iterable[StepTotals]) -> int:
    return sum(total.num_tokens for total in totals)


def _summary(name: str, text: str) -> SummaryMetricFamily:
    return SummaryMetricFamily(f"crosspool:{name}", text, labels=LABELS)
