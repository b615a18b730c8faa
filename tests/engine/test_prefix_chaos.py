"""Random conversations over three models and too few frames: every count of the prefix cache is what a plain recount
gives, nothing starves, and every answer is that of an undisturbed run.
"""

import contextlib
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from crosspool.core import FinishReason
from crosspool.engine.limit_change import LimitChange
from crosspool.engine.rank_losses import MAX_LOSSES
from crosspool.errors import CapacityError, QueueFullError
from tests.support.core_drive import FRAME_BYTES, Drive, a_config, a_model

MODELS = [
    a_model("p", page_tokens=4, frames_per_page=1, max_context=64, weights_ranks=("w0",)),
    a_model("q", page_tokens=3, frames_per_page=2, max_context=48, weights_ranks=("w0", "w1")),
    a_model("r", page_tokens=8, frames_per_page=3, max_context=96, weights_ranks=("w1",)),
]
PAGE_TOKENS = {model.name: model.page_tokens for model in MODELS}
WIDTH = {model.name: model.frames_per_page for model in MODELS}
NUM_FRAMES = 48


def recount(drive: Drive) -> None:
    """The cache's, the pool's and the budget's numbers against the block tables they stand for."""
    pages = drive.core.kv.by_rank["kv0"]
    prefix = pages.prefix
    live = {
        s.sequence_id: s for m in drive.core.live_models.values() for s in (*m.live_sequences(), *m.lingering.values())
    }
    holders: Counter[tuple[int, ...]] = Counter(page for s in live.values() for page in s.table.pages)
    for name in PAGE_TOKENS:
        used = {page for s in live.values() if s.request.model == name for page in s.table.pages}
        cached = prefix.cache._models[name].by_key.values()
        assert prefix.cache.num_reusable(name) == sum(not page.users for page in cached)
        assert pages.pool.used(name) == WIDTH[name] * (len(used) + prefix.cache.num_reusable(name))
        for page in cached:
            assert page.users == {key for key, s in live.items() if page.page in s.table.pages}
        shared = WIDTH[name] * sum(holders[page] > 1 for page in used)
        own = {key: s for key, s in live.items() if s.request.model == name}
        for key, sequence in own.items():
            alone = WIDTH[name] * sum(holders[page] == 1 for page in sequence.table.pages)
            assert pages.budget.claims[key].held == alone
        claims = [claim for key, claim in pages.budget.claims.items() if claim.is_shared and claim.model == name]
        assert sum(claim.held for claim in claims) == shared
    assert pages.budget.is_safe


class Conversations(RuleBasedStateMachine):
    """Prompts begin as earlier conversations did, up to anywhere in them."""

    @initialize(
        admission=st.sampled_from(["reserve", "forecast"]),
        seed=st.integers(0, 99),
        is_ahead=st.booleans(),
        max_num_batched_tokens=st.sampled_from([5, 16, 64]),
        num_prefill_lanes=st.integers(1, 2),
        num_host_frames=st.sampled_from([0, 4, 20, 200]),
    )
    def begin(self, admission, seed, is_ahead, num_host_frames, **settings):
        settings["host_budget_bytes"] = num_host_frames * FRAME_BYTES
        config = a_config(NUM_FRAMES, admission=admission, max_num_seqs=5, forecast_quantile=0.5, **settings)
        self.drive = Drive(config, MODELS, seed=seed, fail_rate=0.03, is_ahead=is_ahead)
        self.told: dict[str, list[list[int]]] = {model.name: [[]] for model in MODELS}
        self.num_kv_losses = 0
        for name in PAGE_TOKENS:  # a forecast that is often too low
            for length in range(1, 9):
                for _ in range(5):
                    self.drive.core._estimate.record(name, length)

    @rule(
        name=st.sampled_from(sorted(PAGE_TOKENS)),
        data=st.data(),
        more=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        max_tokens=st.integers(1, 12),
        n=st.sampled_from([1, 1, 2, 4]),
        salt=st.sampled_from([None, None, "s"]),
    )
    def ask(self, name, data, more, max_tokens, n, salt):
        earlier = data.draw(st.sampled_from(self.told[name]))
        prompt = [*earlier[: data.draw(st.integers(0, len(earlier)))], *more]
        with contextlib.suppress(CapacityError, QueueFullError, ValueError):
            ids = self.drive.add(name, prompt, max_tokens, n=n, cache_salt=salt)
            self.told[name] += [[*prompt, *self.drive.expected(sequence_id)] for sequence_id in ids]

    @rule(for_s=st.floats(0.0, 0.1))
    def go_on(self, for_s):
        self.drive.run(until_s=self.drive.now + for_s)

    @precondition(lambda self: self.drive.requests.keys() - self.drive.ends.keys())
    @rule(data=st.data())
    def leave(self, data):
        running = sorted(self.drive.requests.keys() - self.drive.ends.keys())
        self.drive.end(data.draw(st.sampled_from(running)), FinishReason.ABORT)

    @precondition(lambda self: not self.drive.cluster.down)
    @rule(rank=st.sampled_from(["kv0", "w0", "w1"]), for_s=st.floats(0.0, 0.05))
    def lose(self, rank, for_s):
        self.num_kv_losses += rank == "kv0"
        if self.num_kv_losses > MAX_LOSSES:
            return  # a sequence that loses more in a row is given up
        self.drive.cluster.lose(rank, self.drive.now, for_s)
        self.drive.turn()

    @rule(budget=st.integers(40, NUM_FRAMES), floor=st.integers(0, 3), name=st.sampled_from(sorted(PAGE_TOKENS)))
    def limit(self, budget, floor, name):
        change = LimitChange(budget_bytes=budget * FRAME_BYTES, floor_bytes={name: floor * WIDTH[name] * FRAME_BYTES})
        with contextlib.suppress(ValueError):
            self.drive.core.set_limits(change)
            self.drive._take(self.drive.core.refuse_unfitting(self.drive.now))

    @invariant()
    def a_recount_agrees(self):
        if hasattr(self, "drive") and not self.drive.core.kv.by_rank["kv0"].budget.is_settling:
            recount(self.drive)

    def teardown(self):
        if hasattr(self, "drive"):
            self.drive.run()
            for end in self.drive.ends.values():
                assert end.error is None or isinstance(end.error, CapacityError), end.error
            self.drive.check_all_ended()
            recount(self.drive)


TestConversations = pytest.mark.fuzz(Conversations.TestCase)
TestConversations.settings = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=30)


def in_common(one: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@pytest.mark.fuzz
@settings(max_examples=settings.default.max_examples // 2)
@given(seed=st.integers(0, 10**6), has_tier=st.booleans())
def test_with_room_for_all_exactly_what_was_written_before_is_reused(seed, has_tier):
    """Room in the pool, or in a host tier beside a pool that holds one request at a time."""
    rng = random.Random(seed)
    frames = {"host_budget_bytes": 100_000 * FRAME_BYTES} if has_tier else {}
    drive = Drive(a_config(32 if has_tier else 100_000, max_num_seqs=4, **frames), MODELS, seed=seed)
    written: dict[tuple[str, str | None], list[list[int]]] = {}
    for _ in range(12):
        name, salt = rng.choice(sorted(PAGE_TOKENS)), rng.choice([None, "s"])
        before = written.setdefault((name, salt), [])
        earlier = rng.choice([[], *before])
        prompt = [*earlier[: rng.randint(0, min(len(earlier), 30))], *rng.choices(range(2), k=rng.randint(1, 6))]
        [sequence_id] = drive.add(name, prompt, rng.randint(1, 10), cache_salt=salt)
        drive.run()
        size = PAGE_TOKENS[name]
        common = max((in_common(prompt[:-1], other) // size for other in before), default=0)
        assert drive.ends[sequence_id].cached_tokens == common * size
        before.append([*prompt, *drive.tokens[sequence_id]][:-1])  # its last token was never run


def test_the_chaos_reaches_what_it_is_for():
    """Hits, evictions, shared pages and twins all happen; without them the rules above would show little."""
    drive = Drive(a_config(NUM_FRAMES, max_num_seqs=5, max_num_batched_tokens=5), MODELS, seed=1)
    rng = random.Random(7)
    told: dict[str, list[list[int]]] = {model.name: [[]] for model in MODELS}
    shared = twins = 0
    for _ in range(150):
        name = rng.choice(sorted(PAGE_TOKENS))
        earlier = rng.choice(told[name])
        prompt = [*earlier[: rng.randint(0, len(earlier))], *rng.choices(range(2), k=rng.randint(1, 9))]
        with contextlib.suppress(CapacityError, QueueFullError, ValueError):
            ids = drive.add(name, prompt, rng.randint(1, 8), n=rng.choice([1, 3]))
            told[name] += [[*prompt, *drive.expected(sequence_id)] for sequence_id in ids]
        drive.run(until_s=drive.now + 0.03)
        recount(drive)
        live = [s for m in drive.core.live_models.values() for s in m.live_sequences()]
        shared += any(claim.is_shared for claim in drive.core.kv.by_rank["kv0"].budget.claims.values())
        twins += any(s.prefix is not None and None in s.prefix.filled for s in live)
    drive.run()
    drive.check_all_ended()
    stats = drive.core.stats(drive.now).models
    assert min(model.prefix_hits for model in stats) > 50
    assert min(model.prefix_evictions for model in stats) > 5
    assert shared > 20
    assert twins > 3
