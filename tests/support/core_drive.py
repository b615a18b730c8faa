"""Drives an EngineCore and a simulated cluster through simulated time, and checks the core's promises at every turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from crosspool.core import FinishReason, Request, SamplingParams
from crosspool.engine.claims import can_all_end
from crosspool.engine.config import EngineConfig
from crosspool.engine.engine_core import EngineCore
from crosspool.engine.sequence import SequenceUpdate
from crosspool.engine.served_model import ServedModel
from crosspool.kv_pool.split import KVSplit
from crosspool.models.spec import DenseFFNSpec, GQASpec, LayerSpec, ModelSpec, RopeSpec
from crosspool.scheduler.step import StepDescriptor
from tests.support.scripted_tokens import VOCAB_SIZE, expected_tokens
from tests.support.simulated_cluster import SimulatedCluster

FRAME_BYTES = 4096


def a_model(
    name: str,
    *,
    page_tokens: int = 4,
    frames_per_page: int = 1,
    max_context: int = 1024,
    weights_ranks: Sequence[str] = ("w0",),
    kv_rank: str = "kv0",
    kv_peers: Sequence[str] = (),
    kv_split: KVSplit = "one",
    eos: Sequence[int] = (),
    prefill_ranks: Sequence[str] = (),
) -> ServedModel:
    """A model without weights."""
    rope = RopeSpec(theta=1e4, dim=8)
    attention = GQASpec(num_heads=2, num_kv_heads=1, head_dim=8, rope=rope, softmax_scale=1.0)
    spec = ModelSpec(
        family="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        layers=(LayerSpec(attention=attention, ffn=DenseFFNSpec(intermediate_size=16)),),
        norm_eps=1e-6,
        tie_word_embeddings=True,
        max_position_embeddings=max_context,
        dtype="float32",
        eos_token_ids=tuple(eos),
    )
    return ServedModel(
        name=name,
        spec=spec,
        directory=Path(name),
        weights_ranks=tuple(weights_ranks),
        page_tokens=page_tokens,
        frames_per_page=frames_per_page,
        frame_bytes=FRAME_BYTES,
        kv_rank=kv_rank,
        kv_peers=tuple(kv_peers),
        kv_split=kv_split,
        prefill_ranks=tuple(prefill_ranks),
    )


def a_config(num_frames: int = 64, **changes: object) -> EngineConfig:
    """A pool of `num_frames` frames beside frame 0."""
    return EngineConfig(
        kv_budget_bytes=(num_frames + 1) * FRAME_BYTES,
        frame_bytes=FRAME_BYTES,
        **{"max_num_batched_tokens": 16, **changes},  # type: ignore[arg-type]
    )


class Drive:
    """Core, cluster and the time they share."""

    def __init__(
        self,
        config: EngineConfig,
        models: Sequence[ServedModel],
        *,
        seed: int = 0,
        fail_rate: float = 0.0,
        is_ahead: bool = False,
    ) -> None:
        self.core = EngineCore(config)
        for model in models:
            self.core.add_model(model)
        self.cluster = SimulatedCluster(
            models,
            num_frames=config.num_frames,
            seed=seed,
            fail_rate=fail_rate,
            kv_ranks=config.kv_ranks if len(config.kv_ranks) > 1 else (),
        )
        self.is_ahead = is_ahead  # steps are handed out behind running ones, as the engine does
        self.num_ahead = 0
        self.now = 0.0
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, SequenceUpdate] = {}
        self.first_token_s: dict[int, float] = {}
        self.cut: set[int] = set()  # ended from outside

    def add(
        self,
        model: str,
        prompt: int | Sequence[int] = 5,
        max_tokens: int = 5,
        *,
        n: int = 1,
        stops: Sequence[int] = (),
        min_tokens: int = 0,
        priority: int = 0,
        deadline_s: float | None = None,
        key: str = "",
        cache_salt: str | None = None,
    ) -> list[int]:
        """Add a request of `n` sequences; each one's seed tells it apart. prompt: its tokens, or how many."""
        first = len(self.requests)
        if isinstance(prompt, int):
            prompt = [(first + position) % VOCAB_SIZE for position in range(prompt)]
        requests = [
            Request(
                request_id=f"r{first}",
                model=model,
                prompt_token_ids=list(prompt),
                sampling=SamplingParams(
                    max_tokens=max_tokens, min_tokens=min_tokens, seed=first + index, stop_token_ids=tuple(stops)
                ),
                priority=priority,
                arrival_s=self.now,
                deadline_s=deadline_s,
                key=key,
                cache_salt=cache_salt,
            )
            for index in range(n)
        ]
        ids = self.core.add_requests(requests, self.now)
        for sequence_id, request in zip(ids, requests, strict=True):
            self.requests[sequence_id] = request
            self.tokens[sequence_id] = []
        return ids

    def end(self, sequence_id: int, reason: FinishReason = FinishReason.ABORT) -> bool:
        update = self.core.end_sequence(sequence_id, reason, self.now)
        self._take([] if update is None else [update])
        self.cut.add(sequence_id)
        return update is not None

    @property
    def num_unended(self) -> int:
        """Accepted sequences that still owe their caller an end."""
        return len(self.requests) - len(self.ends)

    def turn(self) -> None:
        """All that happens at this moment."""
        for event in self.cluster.due(self.now):
            self._take(self.core.on_event(event, self.now))
        self._take(self.core.on_time(self.now))
        for rank, ids in self.core.take_forgotten().items():
            self.cluster.forget(rank, ids)
        self._submit(self.core.schedule(self.now))
        if self.is_ahead:
            self.num_ahead += self._submit(self.core.schedule_ahead(self.now))
        self.check()

    def _submit(self, steps: Sequence[StepDescriptor]) -> int:
        for rank, copies in self.core.take_copies().items():
            self.cluster.copy_frames(rank, copies)
        for step in steps:
            self.cluster.submit(step, self.now)
        return len(steps)

    def next_moment(self) -> float | None:
        moments = [self.cluster.next_event_s(), self.core.next_deadline(self.now)]
        return min((moment for moment in moments if moment is not None), default=None)

    def run(self, until_s: float | None = None, max_turns: int = 100_000) -> None:
        """Run until nothing is left to happen, or until `until_s`."""
        for _ in range(max_turns):
            self.turn()
            moment = self.next_moment()
            if moment is None or (until_s is not None and moment > until_s):
                self.now = self.now if until_s is None else until_s
                return
            self.now = max(self.now, moment)
        raise AssertionError(f"still running after {max_turns} turns: {self.core.stats(self.now)}")

    def check(self) -> None:
        """The budget holds, the numbers add up, and everything live can end."""
        stats = self.core.stats(self.now)
        for pool in stats.pools:
            pages = self.core.kv.by_rank[pool.kv_rank]
            parts = (pool.frames_used, pool.frames_reserved, pool.frames_reusable, pool.frames_free)
            assert min(parts) >= 0
            assert sum(parts) == pool.frames_budget
            reusable = 0 if pages.prefix is None else pages.prefix.num_reusable
            assert pool.frames_used == pages.pool.budget - pages.pool.num_free - reusable
            names = [name for name, live in self.core.live_models.items() if pool.kv_rank in live.model.kv_ranks]
            assert sum(pages.frames_used(name) for name in names) == pool.frames_used
            assert can_all_end(pages.pool.num_free + reusable, pages.budget.claims.values())
        for model in stats.models:
            ranks = self.core.live_models[model.name].model.kv_ranks
            assert model.frames_used == sum(self.core.kv.by_rank[rank].frames_used(model.name) for rank in ranks)
            assert model.num_queued <= self.core.config.max_queue + model.num_accepted * self.core.ranks.num_lost
            assert model.num_prefilling + model.num_decoding <= self.core.config.max_num_seqs

    def check_all_ended(self) -> None:
        """Every accepted request has ended, those that ran to their end with the right tokens; nothing is held."""
        assert set(self.ends) == set(self.requests)
        for sequence_id, end in self.ends.items():
            want = self.expected(sequence_id)
            got = self.tokens[sequence_id]
            assert got == want[: len(got)]
            if end.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and sequence_id not in self.cut:
                assert got == want
        for pages in self.core.kv.by_rank.values():
            reusable = 0 if pages.prefix is None else pages.prefix.num_reusable
            assert pages.pool.num_free + reusable == pages.pool.budget
            assert not pages.budget.claims
            assert not pages.stalled
        assert all(live.is_idle for live in self.core.live_models.values())
        assert not any(known for known in self.cluster.known.values())
        assert not self.core._sequences

    def expected(self, sequence_id: int) -> list[int]:
        request = self.requests[sequence_id]
        sampling = request.sampling
        return expected_tokens(
            sampling.seed,
            len(request.prompt_token_ids),
            sampling.max_tokens,
            sampling.stop_token_ids,
            sampling.min_tokens,
        )

    def _take(self, updates: Sequence[SequenceUpdate]) -> None:
        for update in updates:
            assert update.sequence_id not in self.ends, "an update after the end"
            if update.token is not None:
                self.tokens[update.sequence_id].append(update.token.token_id)
                self.first_token_s.setdefault(update.sequence_id, update.time_s)
            if update.finish_reason is not None:
                self.ends[update.sequence_id] = update
