"""PrefillSteps: whose prompts an idle prefill lane runs next, in which chunks, and where."""

from collections.abc import Mapping
from collections.abc import Sequence as Items

from crosspool.engine.config import EngineConfig
from crosspool.engine.kv_pages import KVPages
from crosspool.engine.lanes import Lane
from crosspool.engine.live_models import LiveModel
from crosspool.engine.prefill_chunks import Chunk
from crosspool.engine.prefill_ranks import PrefillRanks, with_bounded_past
from crosspool.engine.prefill_rule import PrefillRule
from crosspool.engine.rank_health import RankHealth
from crosspool.engine.sequence import Sequence
from crosspool.engine.shared_prefill import shared_chunks
from crosspool.engine.step_start import StepStart, prefill_row
from crosspool.engine.turns import Turns
from crosspool.scheduler.step import StepDescriptor


class PrefillSteps:
    """Models take turns; on a prefill rank its residency says which of those that it computes comes next."""

    def __init__(
        self,
        config: EngineConfig,
        lanes: Items[Lane],
        turns: Turns,
        live_models: Mapping[str, LiveModel],
        kv: KVPages,
        ranks: RankHealth,
        prefill_ranks: PrefillRanks,
        starter: StepStart,
    ) -> None:
        self._rerun_tokens = config.rerun_tokens
        self._rule = PrefillRule(
            max_tokens=config.max_num_batched_tokens,
            rerun_tokens=config.rerun_tokens,
            are_apart=config.batch_invariant,
        )
        self._led: dict[str, int] = {}  # by model: the oldest sequence, where the last step had a part of it
        self._lanes = lanes
        self._turns = turns
        self._live_models = live_models
        self._kv = kv
        self._ranks = ranks
        self._prefill_ranks = prefill_ranks
        self._starter = starter

    def step(self, lane: Lane, now: float) -> StepDescriptor | None:
        """The next model's chunk, shared by its prefilling sequences: on the lane's prefill rank, or in the pools."""
        names = {name for name, live in self._live_models.items() if live.prefilling}
        if not names:
            return None
        rank = self._prefill_ranks.of_lane(lane.index)
        turns = self._turns.ready(names)
        if rank is not None:
            own = [
                self._live_models[name] for name in turns if self._prefill_ranks.computes(rank, self._live_models[name])
            ]
            ordered = self._prefill_ranks.order(rank, own, now)
            for name in ordered:
                following = next((other for other in ordered if other != name), None)
                step = self._step_of(lane, self._live_models[name], now, rank, following)
                if step is not None:
                    if step.header.prefill_rank is not None:
                        self._prefill_ranks.take(rank, self._live_models[name])
                    return step
            turns = [name for name in turns if self._live_models[name] not in own]
        for name in turns:
            step = self._step_of(lane, self._live_models[name], now)
            if step is not None:
                return step
        return None

    def _step_of(
        self,
        lane: Lane,
        live: LiveModel,
        now: float,
        prefill_rank: str | None = None,
        next_model: str | None = None,
    ) -> StepDescriptor | None:
        """next_model: whose prompts the prefill rank will probably be given next."""
        waiting = [sequence for sequence in live.prefilling.values() if not sequence.in_step]
        homes_up = live.homes_of(waiting, self._ranks)
        homes = homes_up
        if prefill_rank is not None:  # no weights rank has a part in it
            homes = [home for home in live.needs if self._ranks.are_up((home,), live.model.name)]
        for home in homes:
            chunks = self._chunks(live, home, [sequence for sequence in waiting if sequence.kv_rank == home])
            rank = prefill_rank
            if rank is not None:
                chunks = with_bounded_past(chunks, live.model.model_limit)
                if sum(chunk.num_tokens for chunk in chunks) <= self._rerun_tokens:  # decode's kernels run these
                    rank, chunks = None, chunks if home in homes_up else []
            if chunks:
                self._note(live.model.name, waiting, chunks)
                batch, rows = [chunk.sequence for chunk in chunks], [prefill_row(chunk) for chunk in chunks]
                following = None if rank is None else next_model
                return self._starter.start(lane, live, home, batch, rows, now, prefill_rank=rank, next_model=following)
        return None

    def _chunks(self, live: LiveModel, home: str, waiting: Items[Sequence]) -> list[Chunk]:
        """What the model's next prefill step with this home runs."""
        prefix = self._kv.prefix(live.model.name, home)
        led = self._led.get(live.model.name)
        if prefix is None:
            return self._rule.chunks(waiting, led)
        running = [
            Chunk(sequence, row.num_new_tokens)
            for lane in self._lanes
            if lane.phase == "prefill" and lane.step is not None and lane.step.header.model == live.model.name
            for row, sequence in zip(lane.step.rows, lane.sequences, strict=False)
            if sequence.kv_rank == home
        ]
        return shared_chunks(prefix, waiting, running, lambda left: self._rule.chunks(left, led))

    def _note(self, model: str, waiting: Items[Sequence], chunks: Items[Chunk]) -> None:
        oldest = min(sequence.sequence_id for sequence in waiting)
        if oldest in {chunk.sequence.sequence_id for chunk in chunks}:
            self._led[model] = oldest
        else:
            self._led.pop(model, None)
