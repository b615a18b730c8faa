"""snapshot: the core's state as EngineStats."""

from typing import TYPE_CHECKING

from crosspool.engine.kv_pages import KVPages
from crosspool.engine.live_models import LiveModel
from crosspool.engine.stats import EngineStats, ModelStats
from crosspool.engine.step_log import StepLog

if TYPE_CHECKING:
    from crosspool.engine.engine_core import EngineCore


def snapshot(core: "EngineCore", now: float) -> EngineStats:
    """Everything at `now`. Copies; later changes of the core do not show in it."""
    parked_steps = core.dispatcher.parked_steps
    busy = [lane.present.started_s for lane in core.dispatcher.lanes if lane.present is not None]
    busy += [parked.trouble.first_failed_s for parked in parked_steps.steps]
    parked_seqs = dict.fromkeys(core.live_models, 0)
    for parked in parked_steps.steps:
        parked_seqs[parked.step.header.model] += len(parked.sequences)
    return EngineStats(
        now_s=now,
        models=tuple(
            _model_stats(live, core.kv, parked_seqs[name], core.log) for name, live in core.live_models.items()
        ),
        pools=tuple(pages.stats() for pages in core.kv.by_rank.values()),
        lanes=tuple(lane.stats() for lane in core.dispatcher.lanes),
        num_steps=core.log.num_steps,
        num_replays=parked_steps.num_replays,
        num_stalls=core.dispatcher.num_stalls,
        num_ranks_lost=core.ranks.num_lost,
        last_step_s=core.log.last_step_s,
        busy_since_s=min(busy, default=None),
        ranks_down=dict(core.ranks.down_since_s),
        ranks_given_up={rank: core.ranks.reasons[rank] for rank in core.ranks.given_up},
        held_again={rank: tuple(sorted(models)) for rank, models in core.ranks.holds_again.items()},
        prefill_switches=core.dispatcher.prefill_ranks.num_switches,
        recovery_timeout_s=core.ranks.recovery_timeout_s,
    )


def _model_stats(live: LiveModel, kv: KVPages, num_parked: int, log: StepLog) -> ModelStats:
    """Frames are those of all its KV ranks together; limits hold for each of them."""
    model = live.model
    name, width = model.name, model.frames_per_page * (len(model.kv_ranks) if model.kv_split == "heads" else 1)
    by_rank = kv.frames_by_rank(name, [*live.live_sequences(), *live.lingering.values()])
    frames_used = sum(frames.used for frames in by_rank.values())
    frames_reserved = sum(frames.reserved for frames in by_rank.values())
    frames_reusable = sum(frames.reusable for frames in by_rank.values())
    counts, stowed = kv.prefix_counts(name), kv.tier_counts(name)
    limits = kv.by_rank[model.kv_rank].limits
    return ModelStats(
        name=name,
        num_queued=len(live.queue),
        num_prefilling=len(live.prefilling),
        num_decoding=len(live.decoding),
        num_parked=num_parked,
        pages_used=frames_used // width,
        pages_reserved=frames_reserved // width,
        frames_used=frames_used,
        frames_reserved=frames_reserved,
        page_tokens=live.model.page_tokens,
        frames_per_page=model.frames_per_page,
        prompt_tokens=live.prompt_tokens,
        generated_tokens=live.generated_tokens,
        num_accepted=live.num_accepted,
        num_refused=live.num_refused,
        pages_reusable=frames_reusable // width,
        frames_reusable=frames_reusable,
        prefix_queries=counts.queries,
        prefix_hits=counts.hits,
        prefix_evictions=counts.evictions,
        frames_stowed=kv.frames_stowed(name),
        prefix_stowed=stowed.stowed,
        prefix_brought_back=stowed.brought_back,
        num_preempted=live.num_preempted,
        num_finished={reason.value: count for reason, count in live.num_finished.items()},
        frames_floor=limits.floor(name),
        frames_ceiling=limits.ceilings.get(name),
        frames_reach=kv.reach(model),
        frames_by_rank=by_rank,
        busy_since_s=_busy_since_s(live, log.last_end_s(name)),
        steps=log.totals(name),
    )


def _busy_since_s(live: LiveModel, last_end_s: float | None) -> float | None:
    """The later of the model's last progress and the moment its oldest live sequence came; None without any."""
    if not live.num_live:
        return None
    came_s = min(
        sequence.request.arrival_s if sequence.scheduled_s is None else sequence.scheduled_s
        for sequence in live.live_sequences()
    )
    return came_s if last_end_s is None else max(came_s, last_end_s)
