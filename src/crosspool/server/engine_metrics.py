"""The engine's own numbers, read from its snapshot at the moment Prometheus asks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from crosspool.engine.stats import EngineStats, ModelInfo, ModelState, ModelStats
from crosspool.server.engine_client import EngineClient

Family = GaugeMetricFamily | CounterMetricFamily | SummaryMetricFamily
Rows = Iterable[tuple[str | float, ...]]
"""Each the labels' values and, last, the number."""

MODEL = ("model_name",)
RANK = ("rank",)


class EngineCollector(Collector):
    """Queues, pages, pools, lanes and counters.

    The KV pool's bytes add up: used + reserved + reusable + free are the budget, and the models' pages are the used and
    reserved part of it; reusable ones are cached and as good as free. kv_cache_usage_perc is a model's used frames over
    the frames of its whole KV pool, from 0 to 1.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def describe(self) -> list[Family]:
        """Nothing: names are read at collection, so registering does not ask the engine."""
        return []

    def collect(self) -> Iterator[Family]:
        stats, models = self._engine.stats(), self._engine.models()
        ranks_of = {info.name: info.kv_ranks for info in models}
        frame_bytes = {pool.kv_rank: pool.frame_bytes for pool in stats.pools}
        yield from _requests(stats.models)
        yield from _pages(stats, ranks_of)
        yield from _pools(stats, models, frame_bytes)
        yield _cache_config(stats, ranks_of)
        yield from _prefixes(stats)
        yield from _limits(stats, {info.name: frame_bytes.get(info.kv_rank, 0) for info in models})
        yield from _backings(stats)
        yield from _models(models)
        yield from _steps(stats)
        yield from _step_times(stats.models)
        yield from _moved(stats.models, models)


def _requests(models: Sequence[ModelStats]) -> Iterator[Family]:
    running = ((m.name, m.num_prefilling + m.num_decoding + m.num_parked) for m in models)
    yield _gauge("num_requests_running", "sequences that prefill, decode or wait for a lost worker", MODEL, running)
    yield _gauge("num_requests_waiting", "sequences in the queue", MODEL, ((m.name, m.num_queued) for m in models))
    yield _counter("prompt_tokens", "prompt tokens run", MODEL, ((m.name, m.prompt_tokens) for m in models))
    yield _counter("generation_tokens", "tokens generated", MODEL, ((m.name, m.generated_tokens) for m in models))
    finished = ((m.name, str(reason), count) for m in models for reason, count in m.num_finished.items())
    yield _counter("request_success", "sequences that ended", (*MODEL, "finished_reason"), finished)
    preempted = ((m.name, m.num_preempted) for m in models)
    text = "sequences that lost their KV with a worker and are prefilled again"
    yield _counter("num_preemptions", text, MODEL, preempted)
    verdicts = (
        (m.name, verdict, count)
        for m in models
        for verdict, count in (("accepted", m.num_accepted), ("refused", m.num_refused))
    )
    yield _counter("planner_admissions", "sequences accepted or refused", (*MODEL, "verdict"), verdicts)


def _pages(stats: EngineStats, ranks_of: Mapping[str, Sequence[str]]) -> Iterator[Family]:
    pages = (
        (m.name, state, count)
        for m in stats.models
        for state, count in (("used", m.pages_used), ("reserved", m.pages_reserved), ("reusable", m.pages_reusable))
    )
    yield _gauge("kv_pages", "KV pages of a model", (*MODEL, "state"), pages)
    budgets = {pool.kv_rank: pool.frames_budget for pool in stats.pools}
    whole = {m.name: sum(budgets.get(rank, 0) for rank in ranks_of.get(m.name, ())) for m in stats.models}
    usage = ((m.name, m.frames_used / whole[m.name] if whole[m.name] else 0.0) for m in stats.models)
    yield _gauge("kv_cache_usage_perc", "frames a model uses, as a part of its KV pool, 0 to 1", MODEL, usage)


def _pools(stats: EngineStats, models: Sequence[ModelInfo], frame_bytes: Mapping[str, int]) -> Iterator[Family]:
    rows = [
        ("kv", pool.kv_rank, state, frames * pool.frame_bytes)
        for pool in stats.pools
        for state, frames in (
            ("used", pool.frames_used),
            ("reserved", pool.frames_reserved),
            ("reusable", pool.frames_reusable),
            ("free", pool.frames_free),
        )
    ]
    weights: dict[str, int] = {}
    for info in models:
        for rank, num_bytes in info.bytes_by_rank.items():
            weights[rank] = weights.get(rank, 0) + num_bytes
    rows += [("weights", rank, "used", num_bytes) for rank, num_bytes in sorted(weights.items())]
    yield _gauge("pool_bytes", "memory of a pool", ("pool", "rank", "state"), rows)
    # of several ranks, where a model's KV is split or its sequences go to several
    by_rank = (
        (m.name, rank, state, count * frame_bytes[rank])
        for m in stats.models
        for rank, frames in m.frames_by_rank.items()
        for state, count in (("used", frames.used), ("reserved", frames.reserved), ("reusable", frames.reusable))
    )
    yield _gauge("kv_rank_bytes", "KV memory of a model on a KV rank", (*MODEL, "kv_rank", "state"), by_rank)


def _cache_config(stats: EngineStats, ranks_of: Mapping[str, Sequence[str]]) -> Family:
    names = (*MODEL, "kv_rank", "page_tokens", "frames_per_page", "frame_bytes", "num_frames")
    pools = {pool.kv_rank: pool for pool in stats.pools}
    found = [(m, pools[rank]) for m in stats.models for rank in ranks_of.get(m.name, ()) if rank in pools]
    rows = (
        (m.name, pool.kv_rank, m.page_tokens, m.frames_per_page, pool.frame_bytes, pool.frames_budget, 1)
        for m, pool in found
    )
    return _gauge("cache_config_info", "how a model's pages are cut; always 1", names, rows)


def _prefixes(stats: EngineStats) -> Iterator[Family]:
    text = "prompt tokens that were looked for in the prefix cache"
    yield _counter("prefix_cache_queries", text, MODEL, ((m.name, m.prefix_queries) for m in stats.models))
    text = "prompt tokens that cached pages held, so that they were not run"
    yield _counter("prefix_cache_hits", text, MODEL, ((m.name, m.prefix_hits) for m in stats.models))
    text = "cached pages that were given up for others"
    yield _counter("prefix_cache_evictions", text, MODEL, ((m.name, m.prefix_evictions) for m in stats.models))
    if not any(pool.host_frames_budget for pool in stats.pools):
        return
    text = "cached pages that went to host memory instead of being dropped"
    yield _counter("prefix_cache_stowed", text, MODEL, ((m.name, m.prefix_stowed) for m in stats.models))
    text = "pages that came from host memory instead of being run"
    yield _counter("prefix_cache_brought_back", text, MODEL, ((m.name, m.prefix_brought_back) for m in stats.models))
    memory = (
        (pool.kv_rank, state, frames * pool.frame_bytes)
        for pool in stats.pools
        for state, frames in (
            ("used", pool.host_frames_used),
            ("free", pool.host_frames_budget - pool.host_frames_used),
        )
    )
    yield _gauge("host_pool_bytes", "host memory for cached KV", (*RANK, "state"), memory)


def _limits(stats: EngineStats, frame_bytes: Mapping[str, int]) -> Iterator[Family]:
    """frame_bytes: of the models' KV ranks, by model."""
    budget = ((pool.kv_rank, pool.frames_limit * pool.frame_bytes) for pool in stats.pools)
    yield _gauge("kv_budget_bytes", "what all models together may hold", RANK, budget)
    limits = (
        (m.name, limit, frames * frame_bytes.get(m.name, 0))
        for m in stats.models
        for limit, frames in (("floor", m.frames_floor), ("ceiling", m.frames_ceiling))
        if frames is not None
    )
    yield _gauge("kv_limit_bytes", "floor and ceiling of a model in a KV pool", (*MODEL, "limit"), limits)


def _backings(stats: EngineStats) -> Iterator[Family]:
    """Where frames are mapped for each model: what the driver has done, and who had to wait for it."""
    if not stats.backings:
        return
    ranks = stats.backings.items()
    calls = ((rank, call, count) for rank, n in ranks for call, count in (("map", n.maps), ("unmap", n.unmaps)))
    yield _counter("kv_mappings", "pages mapped and unmapped", (*RANK, "operation"), calls)
    waits = (
        (rank, path, count)
        for rank, n in ranks
        for path, count in (("decode", n.decode_waits), ("full", n.full_waits), ("prefill", n.prefill_waits))
    )
    yield _counter("kv_mapping_waits", "steps that waited for a page to be mapped", (*RANK, "path"), waits)
    yield _counter("kv_mapping_failures", "failed driver calls", RANK, ((rank, n.failures) for rank, n in ranks))
    yield _gauge("kv_mapped_frames", "frames mapped for some model", RANK, ((r, n.mapped_frames) for r, n in ranks))
    longest = ((rank, n.longest_wait_s) for rank, n in ranks)
    yield _gauge("kv_mapping_longest_wait_seconds", "longest of the waits", RANK, longest)


def _models(models: Sequence[ModelInfo]) -> Iterator[Family]:
    states = ((info.name, state, float(info.state == state)) for info in models for state in get_args(ModelState))
    yield _gauge("model_state", "1 for the state a model is in", (*MODEL, "state"), states)
    loads = ((info.name, info.load_s) for info in models if info.load_s is not None)
    yield _gauge("model_load_seconds", "time the model took to load", MODEL, loads)


def _steps(stats: EngineStats) -> Iterator[Family]:
    running = [lane.phase for lane in stats.lanes if lane.state == "running"]
    lanes = ((phase, running.count(phase)) for phase in ("prefill", "decode"))
    yield _gauge("lanes_running", "lanes with a step in flight", ("phase",), lanes)
    yield _counter("steps", "steps that ended", (), [(stats.num_steps,)])
    yield _counter("step_replays", "steps run again after a failure", (), [(stats.num_replays,)])
    if stats.prefill_switches:
        text = "models brought in on a prefill rank"
        yield _counter("prefill_switches", text, RANK, stats.prefill_switches.items())
    yield _counter("ranks_lost", "workers that died or hung", (), [(stats.num_ranks_lost,)])
    yield _gauge("ranks_down", "workers that are away", (), [(len(stats.ranks_down),)])


def _step_times(models: Sequence[ModelStats]) -> Iterator[Family]:
    """Sums and counts over steps, by model and phase.

    What the KV rank computed, what the weights rank that worked longest computed, and what the KV rank waited beyond
    that. A backend that does not tell the last two apart has neither.
    """
    steps = [((m.name, phase), totals) for m in models for phase, totals in m.steps.items()]
    told = [(labels, totals) for labels, totals in steps if totals.num_told]
    text = "time a step computed on its KV rank"
    yield _summary("attention_seconds", text, ((at, total.num_steps, total.attention_s) for at, total in steps))
    text = "time a step computed on the weights rank that worked longest for it"
    yield _summary("ffn_seconds", text, ((at, total.num_told, total.ffn_s) for at, total in told))
    text = "time a step's KV rank waited beyond the FFN's own: crossings and turns"
    yield _summary("transfer_seconds", text, ((at, total.num_told, total.transfer_s) for at, total in told))
    tokens = ((at, total.num_steps, total.num_tokens) for at, total in steps)
    yield _summary("iteration_tokens_total", "tokens of a step", tokens)


def _moved(stats: Sequence[ModelStats], models: Sequence[ModelInfo]) -> Iterator[Family]:
    """Tokens that went to experts, and weights that went into memory."""
    run = {m.name: sum(total.num_tokens for total in m.steps.values()) for m in stats}
    experts = (
        (info.name, str(layer), num_experts * run.get(info.name, 0))
        for info in models
        for layer, num_experts in enumerate(info.experts_by_layer)
        if num_experts
    )
    text = "pairs of a token and an expert it went to, by MoE layer, of all steps that ended"
    yield _counter("expert_tokens", text, (*MODEL, "layer"), experts)
    text = "weights read into the ranks' memory since the model was added, again after a loss included"
    yield _counter("weight_bytes_moved", text, MODEL, ((info.name, info.moved_bytes) for info in models))


def _gauge(name: str, text: str, labels: Sequence[str], rows: Rows) -> Family:
    return _filled(GaugeMetricFamily(f"crosspool:{name}", text, labels=labels), rows)


def _counter(name: str, text: str, labels: Sequence[str], rows: Rows) -> Family:
    return _filled(CounterMetricFamily(f"crosspool:{name}", text, labels=labels), rows)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, rows: Rows) -> Family:
    for *labels, value in rows:
        family.add_metric([str(label) for label in labels], float(value))
    return family


def _summary(name: str, text: str, rows: Iterable[tuple[tuple[str, str], int, float]]) -> Family:
    family = SummaryMetricFamily(f"crosspool:{name}", text, labels=(*MODEL, "phase"))
    for labels, count, total in rows:
        family.add_metric(labels, count, total)
    return family
