"""KVRankPages: one KV rank's pool and budget, and what sequences take from them."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager

from crosspool.engine.admission import PageBudget
from crosspool.engine.claims import Claim
from crosspool.engine.forecast import OutputEstimate
from crosspool.engine.lengths import frames_for
from crosspool.engine.limit_change import LimitChange, changed_limits, first_limits
from crosspool.engine.pages_aside import PagesAside
from crosspool.engine.prefix_pages import PrefixPages
from crosspool.engine.sequence import Sequence
from crosspool.engine.served_model import ServedModel
from crosspool.engine.stats import PoolStats
from crosspool.kv_pool.ahead import AheadOfNeed
from crosspool.kv_pool.host_tier import HostTier
from crosspool.kv_pool.limits import PoolLimits, PoolSize, check_limits
from crosspool.kv_pool.pool import KVPool, Page
from crosspool.kv_pool.prefix_cache import CachedPage


class KVRankPages:
    """Admits sequences, grows their block tables and takes their pages back.

    The budget decides and the pool hands out: what the budget grants, the pool has, if need be once pages that nobody
    uses any more are evicted. prefix: None where prefixes are not cached.
    """

    def __init__(
        self,
        kv_rank: str,
        num_frames: int,
        frame_bytes: int,
        estimate: OutputEstimate,
        *,
        caches_prefixes: bool = False,
        maps_frames: bool = False,
        first_frame: int = 0,
        num_host_frames: int = 0,
    ) -> None:
        """maps_frames: its frames are mapped ahead of need. first_frame: number of its frame 0 among all ranks'.
        num_host_frames: of host memory that keeps cached pages which have to go; 0: none does."""
        self.kv_rank = kv_rank
        self.frame_bytes = frame_bytes
        self.pool = KVPool(num_frames, first_frame)
        self.ahead = AheadOfNeed(self.pool) if maps_frames else None
        self.budget = PageBudget(self.pool.budget)
        self.aside = PagesAside(self.budget, self.allocate)
        self.estimate = estimate
        self.stalled: set[int] = set()  # sequences that wait for a page; nothing is admitted meanwhile
        self._models: dict[str, ServedModel] = {}
        self.tier = HostTier(num_host_frames) if num_host_frames and caches_prefixes else None
        self.prefix = PrefixPages(self.pool, self.budget, self._models, self.tier) if caches_prefixes else None

    def add_model(self, model: ServedModel) -> None:
        """Serve the model within its limits. Raises ValueError where they cannot be held beside those of the others."""
        limits = self.limits_with(model)
        self.pool.add_model(model.name, model.frames_per_page)
        self._models[model.name] = model
        if self.prefix is not None:
            self.prefix.add_model(model.name)
        self._hold_to(limits)

    def remove_model(self, name: str) -> None:
        if self.prefix is not None:
            self.prefix.remove_model(name)
        self.pool.remove_model(name)
        del self._models[name]
        self._hold_to(self.budget.limits.without(name))

    @property
    def limits(self) -> PoolLimits:
        return self.budget.limits

    def limits_with(self, model: ServedModel) -> PoolLimits:
        """The limits once `model` is served too. Raises ValueError where they cannot be held."""
        limits = first_limits(self.limits, model)
        check_limits(limits, self._size(model))
        return limits

    def changed_limits(self, change: LimitChange) -> PoolLimits:
        """The limits after `change`. Raises ValueError, with the true numbers, where they cannot be held."""
        limits = changed_limits(self.limits, change, self._models, self.frame_bytes)
        check_limits(limits, self._size())
        return limits

    def set_limits(self, limits: PoolLimits) -> None:
        """Hold what is admitted from now on to limits that have been checked; nothing live is touched."""
        self._hold_to(limits)
        if self.prefix is not None:
            self.prefix.hold_to_limits()

    def _hold_to(self, limits: PoolLimits) -> None:
        """Any new limits may let the budget settle, also those that only lost a model; then it counts on all memory."""
        self.budget.set_limits(limits)
        if self.ahead is not None:
            unused = self.pool.budget - limits.budget
            self.ahead.leave_unused(unused, is_settling=self.budget.is_settling)

    def _size(self, *more: ServedModel) -> PoolSize:
        models = [*self._models.values(), *more]
        return PoolSize(
            num_frames=self.pool.budget,
            frame_bytes=self.frame_bytes,
            frames_per_page={model.name: model.frames_per_page for model in models},
        )

    def admits(self, sequence: Sequence) -> bool:
        with self._asked(sequence) as claim:
            return self.budget.admits(claim)

    def is_capped(self, sequence: Sequence) -> bool:
        """Whether its model's ceiling keeps it out, however much is free."""
        with self._asked(sequence) as claim:
            return self.budget.is_capped(claim)

    def is_floored(self, sequence: Sequence) -> bool:
        """Whether what is kept for its model holds it."""
        with self._asked(sequence) as claim:
            return self.budget.is_floored(claim)

    def admit(self, sequence: Sequence) -> None:
        """Claim what the sequence needs and give it the pages of all tokens it has: cached ones first."""
        if self.prefix is None:
            self.budget.open(sequence.sequence_id, self._claim(sequence))
        else:
            found = self.prefix.find(sequence)
            claim = self._claim(sequence, found)
            sequence.table.extend(tuple(self.prefix.use(sequence, found)))
            self.budget.open(sequence.sequence_id, claim)
            self.prefix.keep_stowed(sequence)
        self._extend(sequence, sequence.num_tokens)
        if self.prefix is not None:
            self.prefix.bring_back(sequence)

    def started(self, sequence: Sequence) -> None:
        """The sequence's first step is about to be handed out: its KV worker gets to know its pages."""
        if self.prefix is not None:
            self.prefix.started(sequence)

    def step_ended(self, sequence: Sequence) -> None:
        """A step has written slots of the sequence: `num_cached_tokens` of them are whole."""
        if self.prefix is not None:
            self.prefix.note_filled(sequence)

    def ensure_slot(self, sequence: Sequence) -> bool:
        """Give the sequence a slot for one token more than it has written; False if it has to wait for a page."""
        num_tokens = sequence.num_cached_tokens + 1
        if sequence.table.num_missing(num_tokens) == 0:
            return True
        if not self._grow(sequence, num_tokens):
            self.stalled.add(sequence.sequence_id)
            return False
        self.stalled.discard(sequence.sequence_id)
        return True

    def ensure_slot_ahead(self, sequence: Sequence, count: int = 1) -> bool:
        """As `ensure_slot`, of `count` slots behind those that steps in flight write; without them it waits not."""
        num_tokens = sequence.num_cached_tokens + sequence.num_ahead + count
        return sequence.table.num_missing(num_tokens) == 0 or self._grow(sequence, num_tokens)

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Pages for `num_tokens` tokens, if the budget grants them."""
        model = self._models[sequence.request.model]
        missing = sequence.table.num_missing(num_tokens)
        shared = frames_for(model, sequence.max_tokens) - self.budget.claims[sequence.sequence_id].most
        expected = frames_for(model, self._expected_tokens(sequence)) - shared
        if not self.budget.grow(sequence.sequence_id, missing * model.frames_per_page, expected):
            return False
        self._extend(sequence, num_tokens)
        return True

    def stop_growing(self, sequence: Sequence) -> None:
        """The sequence has ended while a step in flight uses its pages: only those stay claimed."""
        self.budget.stop_growing(sequence.sequence_id)

    def release(self, sequence: Sequence) -> None:
        """Take the sequence's pages back. No step in flight may use them."""
        self.budget.close(sequence.sequence_id)
        pages = sequence.table.clear()
        if self.prefix is not None:
            pages = self.prefix.leave(sequence, pages)
        self.pool.free(sequence.request.model, pages)
        self.stalled.discard(sequence.sequence_id)

    def allocate(self, name: str, num_pages: int) -> tuple[Page, ...]:
        """Pages that the budget has granted."""
        if self.prefix is not None:
            self.prefix.make_room(name, num_pages * self._models[name].frames_per_page)
        pages = self.pool.allocate(name, num_pages)
        assert pages is not None, f"the budget of {self.kv_rank} granted pages that its pool does not have"
        return pages

    def room(self, model: str) -> int:
        """Frames that could be promised to new sequences of the model."""
        return self.budget.room(model)

    def room_under_ceiling(self, model: str) -> int:
        return self.budget.room_under_ceiling(model)

    def room_in_floor(self, model: str) -> int:
        return self.budget.room_in_floor(model)

    def take_back(self, model: str, pages: Items[Page]) -> None:
        """Pages that a sequence was handed. No step in flight may use them."""
        self.pool.free(model, pages)

    def memory_lost(self) -> None:
        """The rank's memory is gone, and its sequences have been released: nothing can be used again."""
        if self.prefix is not None:
            for model in self._models:
                self.prefix.drop_unused(model)
        if self.tier is not None:
            self.tier.clear()
        self.nothing_is_mapped()

    def nothing_is_mapped(self) -> None:
        """The rank has started anew: no free page is mapped already."""
        for model in self._models:
            self.pool.unshelve(model)
        if self.ahead is not None:
            self.ahead.started_anew()

    def frames_used(self, model: str) -> int:
        """Frames in block tables of the model, each once."""
        reusable = 0 if self.prefix is None else self.prefix.frames_reusable(model)
        return self.pool.used(model) - reusable

    @property
    def num_held(self) -> int:
        """Frames in block tables, of all models."""
        return self.budget.num_held - self.aside.num_frames

    def stats(self) -> PoolStats:
        used, reserved = self.num_held, self.budget.num_reserved + self.aside.num_frames
        unpromised = self.pool.budget - used - reserved
        reusable = 0 if self.prefix is None else min(unpromised, self.prefix.num_reusable)
        return PoolStats(
            kv_rank=self.kv_rank,
            frame_bytes=self.frame_bytes,
            frames_budget=self.pool.budget,
            frames_used=used,
            frames_reserved=reserved,
            frames_reusable=reusable,
            frames_free=unpromised - reusable,
            frames_limit=self.limits.budget,
            frames_kept=self.limits.kept,
            is_settling=self.budget.is_settling,
            host_frames_budget=0 if self.tier is None else self.tier.budget,
            host_frames_used=0 if self.tier is None else sum(map(self.tier.num_frames, self._models)),
        )

    def frames_reserved(self, sequence_ids: list[int]) -> int:
        """Frames promised to these live sequences beyond those they hold."""
        claims = (self.budget.claims[sequence_id] for sequence_id in sequence_ids)
        return sum(claim.expected - claim.held for claim in claims) + self.aside.of(sequence_ids)

    @contextmanager
    def _asked(self, sequence: Sequence) -> Iterator[Claim]:
        """What a queued sequence would claim; meanwhile, what it would share with others counts as shared."""
        if self.prefix is None:
            yield self._claim(sequence)
            return
        found = self.prefix.find(sequence)
        with self.prefix.lent(found):
            yield self._claim(sequence, found)

    def _claim(self, sequence: Sequence, found: Items[CachedPage] = ()) -> Claim:
        """What a new sequence holds alone, if it uses the cached pages `found`."""
        model = self._models[sequence.request.model]
        in_use = 0 if self.prefix is None else self.prefix.frames_in_use(found)
        return Claim(
            held=frames_for(model, sequence.num_tokens) - in_use,
            expected=frames_for(model, self._expected_tokens(sequence)) - in_use,
            most=frames_for(model, sequence.max_tokens) - in_use,
            model=model.name,
        )

    def _expected_tokens(self, sequence: Sequence) -> int:
        request, num_generated = sequence.request, sequence.num_generated_tokens
        expected = self.estimate.expected_tokens(request.model, num_generated, request.sampling.max_tokens)
        return sequence.num_prompt_tokens + max(expected, num_generated)

    def _extend(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.table.extend(self.allocate(sequence.request.model, sequence.table.num_missing(num_tokens)))
