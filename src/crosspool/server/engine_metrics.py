"""The engine's own numbers, read from its snapshot at the moment Prometheus asks."""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from crosspool.engine.stats import EngineStats, ModelInfo, ModelStats
from crosspool.server.engine_client import EngineClient
from crosspool.server.step_metrics import moved, step_times

Family = GaugeMetricFamily | CounterMetricFamily | SummaryMetricFamily
STATES = ("loading", "ready", "draining", "failed")


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
        yield from _requests(stats)
        yield from _pages(stats, models)
        yield from _prefixes(stats)
        yield from _limits(stats, {model.name: model.kv_rank for model in models})
        yield from _backings(stats)
        yield from _models(models)
        yield from _steps(stats)
        yield from step_times(stats)
        yield from moved(stats, models)


def _requests(stats: EngineStats) -> Iterator[Family]:
    running = _gauge("num_requests_running", "sequences that prefill, decode or wait for a lost worker")
    waiting = _gauge("num_requests_waiting", "sequences in the queue")
    prompt = _counter("prompt_tokens", "prompt tokens run")
    generated = _counter("generation_tokens", "tokens generated")
    finished = CounterMetricFamily(
        "crosspool:request_success", "sequences that ended", labels=("model_name", "finished_reason")
    )
    for model in stats.models:
        running.add_metric([model.name], model.num_prefilling + model.num_decoding + model.num_parked)
        waiting.add_metric([model.name], model.num_queued)
        prompt.add_metric([model.name], model.prompt_tokens)
        generated.add_metric([model.name], model.generated_tokens)
        for reason, count in model.num_finished.items():
            finished.add_metric([model.name, str(reason)], count)
    yield from (running, waiting, prompt, generated, finished)
    preempted = _counter("num_preemptions", "sequences that lost their KV with a worker and are prefilled again")
    verdicts = CounterMetricFamily(
        "crosspool:planner_admissions", "sequences accepted or refused", labels=("model_name", "verdict")
    )
    for model in stats.models:
        preempted.add_metric([model.name], model.num_preempted)
        verdicts.add_metric([model.name, "accepted"], model.num_accepted)
        verdicts.add_metric([model.name, "refused"], model.num_refused)
    yield from (preempted, verdicts)


def _pages(stats: EngineStats, models: list[ModelInfo]) -> Iterator[Family]:
    pages = GaugeMetricFamily("crosspool:kv_pages", "KV pages of a model", labels=("model_name", "state"))
    usage = _gauge("kv_cache_usage_perc", "frames a model uses, as a part of its KV pool, 0 to 1")
    budgets = {pool.kv_rank: pool.frames_budget for pool in stats.pools}
    ranks_of = {model.name: model.kv_ranks for model in models}
    for model in stats.models:
        pages.add_metric([model.name, "used"], model.pages_used)
        pages.add_metric([model.name, "reserved"], model.pages_reserved)
        pages.add_metric([model.name, "reusable"], model.pages_reusable)
        budget = sum(budgets.get(rank, 0) for rank in ranks_of.get(model.name, ()))
        usage.add_metric([model.name], _share(model, budget))
    pool_bytes = GaugeMetricFamily("crosspool:pool_bytes", "memory of a pool", labels=("pool", "rank", "state"))
    for pool in stats.pools:
        for state, frames in (
            ("used", pool.frames_used),
            ("reserved", pool.frames_reserved),
            ("reusable", pool.frames_reusable),
            ("free", pool.frames_free),
        ):
            pool_bytes.add_metric(["kv", pool.kv_rank, state], frames * pool.frame_bytes)
    weights: dict[str, int] = {}
    for info in models:
        for rank, num_bytes in info.bytes_by_rank.items():
            weights[rank] = weights.get(rank, 0) + num_bytes
    for rank, num_bytes in sorted(weights.items()):
        pool_bytes.add_metric(["weights", rank, "used"], num_bytes)
    yield from (pages, usage, pool_bytes, _rank_bytes(stats), _cache_config(stats, ranks_of))


def _rank_bytes(stats: EngineStats) -> GaugeMetricFamily:
    """What each model has on each KV rank: several, where its KV is split or its sequences go to several."""
    found = GaugeMetricFamily(
        "crosspool:kv_rank_bytes", "KV memory of a model on a KV rank", labels=("model_name", "kv_rank", "state")
    )
    frame_bytes = {pool.kv_rank: pool.frame_bytes for pool in stats.pools}
    for model in stats.models:
        for rank, frames in model.frames_by_rank.items():
            for state, count in (("used", frames.used), ("reserved", frames.reserved), ("reusable", frames.reusable)):
                found.add_metric([model.name, rank, state], count * frame_bytes[rank])
    return found


def _prefixes(stats: EngineStats) -> Iterator[Family]:
    queries = _counter("prefix_cache_queries", "prompt tokens that were looked for in the prefix cache")
    hits = _counter("prefix_cache_hits", "prompt tokens that cached pages held, so that they were not run")
    evictions = _counter("prefix_cache_evictions", "cached pages that were given up for others")
    for model in stats.models:
        queries.add_metric([model.name], model.prefix_queries)
        hits.add_metric([model.name], model.prefix_hits)
        evictions.add_metric([model.name], model.prefix_evictions)
    yield from (queries, hits, evictions)
    if any(pool.host_frames_budget for pool in stats.pools):
        yield from _host_tier(stats)


def _host_tier(stats: EngineStats) -> Iterator[Family]:
    stowed = _counter("prefix_cache_stowed", "cached pages that went to host memory instead of being dropped")
    brought_back = _counter("prefix_cache_brought_back", "pages that came from host memory instead of being run")
    for model in stats.models:
        stowed.add_metric([model.name], model.prefix_stowed)
        brought_back.add_metric([model.name], model.prefix_brought_back)
    memory = GaugeMetricFamily("crosspool:host_pool_bytes", "host memory for cached KV", labels=("rank", "state"))
    for pool in stats.pools:
        free = pool.host_frames_budget - pool.host_frames_used
        for state, frames in (("used", pool.host_frames_used), ("free", free)):
            memory.add_metric([pool.kv_rank, state], frames * pool.frame_bytes)
    yield from (stowed, brought_back, memory)


def _cache_config(stats: EngineStats, ranks_of: Mapping[str, Sequence[str]]) -> GaugeMetricFamily:
    names = ("model_name", "kv_rank", "page_tokens", "frames_per_page", "frame_bytes", "num_frames")
    found = GaugeMetricFamily("crosspool:cache_config_info", "how a model's pages are cut; always 1", labels=names)
    pools = {pool.kv_rank: pool for pool in stats.pools}
    for model in stats.models:
        for pool in (pools[rank] for rank in ranks_of.get(model.name, ()) if rank in pools):
            sizes = (model.page_tokens, model.frames_per_page, pool.frame_bytes, pool.frames_budget)
            found.add_metric([model.name, pool.kv_rank, *map(str, sizes)], 1)
    return found


def _share(model: ModelStats, budget: int) -> float:
    return model.frames_used / budget if budget else 0.0


def _backings(stats: EngineStats) -> Iterator[Family]:
    """Where frames are mapped for each model: what the driver has done, and who had to wait for it."""
    if not stats.backings:
        return
    calls = CounterMetricFamily("crosspool:kv_mappings", "pages mapped and unmapped", labels=("rank", "operation"))
    waits = CounterMetricFamily(
        "crosspool:kv_mapping_waits", "steps that waited for a page to be mapped", labels=("rank", "path")
    )
    failures = CounterMetricFamily("crosspool:kv_mapping_failures", "failed driver calls", labels=("rank",))
    mapped = GaugeMetricFamily("crosspool:kv_mapped_frames", "frames mapped for some model", labels=("rank",))
    longest = GaugeMetricFamily("crosspool:kv_mapping_longest_wait_seconds", "longest of the waits", labels=("rank",))
    for rank, counts in stats.backings.items():
        calls.add_metric([rank, "map"], counts.maps)
        calls.add_metric([rank, "unmap"], counts.unmaps)
        waits.add_metric([rank, "decode"], counts.decode_waits)
        waits.add_metric([rank, "full"], counts.full_waits)
        waits.add_metric([rank, "prefill"], counts.prefill_waits)
        failures.add_metric([rank], counts.failures)
        mapped.add_metric([rank], counts.mapped_frames)
        longest.add_metric([rank], counts.longest_wait_s)
    yield from (calls, waits, failures, mapped, longest)


def _limits(stats: EngineStats, rank_of: Mapping[str, str]) -> Iterator[Family]:
    limits = GaugeMetricFamily(
        "crosspool:kv_limit_bytes", "floor and ceiling of a model in a KV pool", labels=("model_name", "limit")
    )
    budget = GaugeMetricFamily("crosspool:kv_budget_bytes", "what all models together may hold", labels=("rank",))
    frame_bytes = {pool.kv_rank: pool.frame_bytes for pool in stats.pools}
    for pool in stats.pools:
        budget.add_metric([pool.kv_rank], pool.frames_limit * pool.frame_bytes)
    for model in stats.models:
        each = frame_bytes.get(rank_of.get(model.name, ""), 0)
        limits.add_metric([model.name, "floor"], model.frames_floor * each)
        if model.frames_ceiling is not None:
            limits.add_metric([model.name, "ceiling"], model.frames_ceiling * each)
    yield from (budget, limits)


def _models(models: list[ModelInfo]) -> Iterator[Family]:
    state = GaugeMetricFamily("crosspool:model_state", "1 for the state a model is in", labels=("model_name", "state"))
    load = _gauge("model_load_seconds", "time the model took to load")
    for model in models:
        for name in STATES:
            state.add_metric([model.name, name], float(model.state == name))
        if model.load_s is not None:
            load.add_metric([model.name], model.load_s)
    yield from (state, load)


def _steps(stats: EngineStats) -> Iterator[Family]:
    lanes = GaugeMetricFamily("crosspool:lanes_running", "lanes with a step in flight", labels=("phase",))
    for phase in ("prefill", "decode"):
        running = [lane for lane in stats.lanes if lane.phase == phase and lane.state == "running"]
        lanes.add_metric([phase], len(running))
    yield lanes
    yield CounterMetricFamily("crosspool:steps", "steps that ended", value=stats.num_steps)
    yield CounterMetricFamily("crosspool:step_replays", "steps run again after a failure", value=stats.num_replays)
    if stats.prefill_switches:
        switches = CounterMetricFamily(
            "crosspool:prefill_switches", "models brought in on a prefill rank", labels=("rank",)
        )
        for rank, count in stats.prefill_switches.items():
            switches.add_metric([rank], count)
        yield switches
    yield CounterMetricFamily("crosspool:ranks_lost", "workers that died or hung", value=stats.num_ranks_lost)
    yield GaugeMetricFamily("crosspool:ranks_down", "workers being restarted", value=len(stats.ranks_down))


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"crosspool:{name}", text, labels=("model_name",))


def _counter(name: str, text: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"crosspool:{name}", text, labels=("model_name",))
