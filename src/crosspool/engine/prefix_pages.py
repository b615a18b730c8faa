"""PrefixPages: full pages that sequences of one KV rank have in common, and those that ended ones leave behind."""

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass

from crosspool.engine.admission import PageBudget
from crosspool.engine.sequence import Sequence, SequencePrefix
from crosspool.engine.served_model import ServedModel
from crosspool.kv_pool.host_tier import HostTier
from crosspool.kv_pool.pool import KVPool, Page
from crosspool.kv_pool.prefix_cache import CachedPage, PrefixCache, PrefixChain


@dataclass(slots=True)
class PrefixCounts:
    """Of one model since it was added. queries, hits: tokens of started requests, and those of them found here."""

    queries: int = 0
    hits: int = 0
    evictions: int = 0  # pages


class PrefixPages:
    """Between the cache, which knows tokens and users of pages, and the pool and the budget, which count frames.

    A page is shared only when it is full, so nobody ever writes into a page that two sequences have. A page with one
    user is in that sequence's claim, one with several is in the shared claim, and one without any is in none: what
    admission takes for free frames are the pool's free ones and the reusable pages, each once.
    """

    def __init__(
        self, pool: KVPool, budget: PageBudget, models: Mapping[str, ServedModel], tier: HostTier | None = None
    ) -> None:
        """tier: where pages that have to go are kept; not those of models that are split over KV ranks."""
        self.cache = PrefixCache()
        self.tier = tier
        self.counts: dict[str, PrefixCounts] = {}
        self._pool = pool
        self._budget = budget
        self._models = models
        self._newest: tuple[tuple[str, str | None, list[int]], PrefixChain] | None = None

    def add_model(self, name: str) -> None:
        self.cache.add_model(name)
        self.counts[name] = PrefixCounts()
        if self.tier is not None:
            self.tier.add_model(name, self._models[name].frames_per_page)

    def remove_model(self, name: str) -> None:
        self._pool.free(name, self.cache.remove_model(name))
        if self.tier is not None:
            self.tier.remove_model(name)
        del self.counts[name]
        self._newest = None

    def drop_unused(self, model: str) -> int:
        """Forget the model's pages that nobody uses, the stowed ones too, and give them back; frames free now."""
        if self.tier is not None:
            self.tier.forget(model)
        pages = self.cache.clear(model)
        self._pool.free(model, pages)
        return sum(map(len, pages))

    def frames_reusable(self, model: str) -> int:
        return self.cache.num_reusable(model) * self._models[model].frames_per_page

    @property
    def num_reusable(self) -> int:
        """Frames of all models' reusable pages."""
        return sum(map(self.frames_reusable, self.counts))

    def find(self, sequence: Sequence) -> list[CachedPage]:
        """Pages that hold what comes next of the sequence's tokens. Its last token is never among them: it has to run
        for the next one to be drawn.
        """
        prefix, model = self._prefix(sequence), self._models[sequence.request.model]
        last = (sequence.num_tokens - 1) // model.page_tokens
        keys = prefix.chain.reach(last, sequence.token_ids)
        return self.cache.match(model.name, keys[len(prefix.filled) : last])

    @contextmanager
    def lent(self, found: Items[CachedPage]) -> Iterator[None]:
        """Meanwhile, pages that one sequence has alone count as shared: another may come to use them too."""
        self._share(found)
        try:
            yield
        finally:
            self._share(found, sign=-1)

    def frames_in_use(self, found: Items[CachedPage]) -> int:
        """Frames of these pages that others hold: whoever uses the pages too needs so many less of its own."""
        return sum(bool(page.users) for page in found) * self._width(found)

    def use(self, sequence: Sequence, found: Items[CachedPage]) -> list[Page]:
        """The sequence uses `found`, whose tokens it need not run; their pages, for its block table."""
        self.add_user(found, sequence.sequence_id)
        filled = self._prefix(sequence).filled
        filled.extend(found)
        reached = len(filled) * sequence.table.page_tokens  # pages that were brought back may go beyond
        sequence.num_cached_tokens = max(sequence.num_cached_tokens, reached)
        return [page.page for page in found]

    def num_stowed(self, sequence: Sequence, num_found: int) -> int:
        """Pages that can be brought back behind the `num_found` that were found here."""
        return 0 if self.tier is None else len(self._stowed(self.tier, sequence, num_found))

    def keep_stowed(self, sequence: Sequence) -> None:
        """The sequence's pages are about to be made: what is to be brought back into them outlasts the others."""
        if self.tier is not None:
            self.tier.keep(sequence.request.model, self._stowed(self.tier, sequence))

    def bring_back(self, sequence: Sequence) -> None:
        """Fill the sequence's own pages from stowed ones, as far as these follow what it has; it need not run them."""
        if self.tier is None:
            return
        keys, first = self._stowed(self.tier, sequence), len(self._prefix(sequence).filled)
        for key, page in zip(keys, sequence.table.pages[first:], strict=False):
            self.tier.bring_back(sequence.request.model, key, page)
        if keys:
            sequence.num_cached_tokens = (first + len(keys)) * sequence.table.page_tokens
        self.tier.keep(sequence.request.model, [])

    def _stowed(self, tier: HostTier, sequence: Sequence, num_found: int = 0) -> list[bytes]:
        """Keys of the stowed pages that follow those that the sequence has and `num_found` more."""
        prefix, model = self._prefix(sequence), self._models[sequence.request.model]
        last = (sequence.num_tokens - 1) // model.page_tokens
        keys = prefix.chain.reach(last, sequence.token_ids)[len(prefix.filled) + num_found : last]
        return keys[: tier.num_known(model.name, keys)]

    def catch_up(self, sequence: Sequence) -> None:
        """Before its first step: use pages that others have filled since it was admitted, in place of its own."""
        found = self.find(sequence)
        if not found:
            return
        key, num_frames = sequence.sequence_id, self.frames_in_use(found)
        with self.lent(found):
            self._budget.give_up(key, num_frames)
            is_safe = self._budget.is_safe
            if not is_safe:
                self._budget.give_up(key, -num_frames)
        if not is_safe:
            return
        start = len(self._prefix(sequence).filled)
        own = sequence.table.replace(start, self.use(sequence, found))
        self._pool.free(sequence.request.model, own, was_used=False)

    def next_key(self, sequence: Sequence) -> bytes | None:
        """The key of the first page that a sequence which has not started lacks; None if it has to run that itself."""
        page = sequence.num_cached_tokens // sequence.table.page_tokens
        last = (sequence.num_tokens - 1) // sequence.table.page_tokens
        return self._prefix(sequence).chain.reach(last, sequence.token_ids)[page] if page < last else None

    def key_at(self, sequence: Sequence, page: int) -> bytes | None:
        """The key of one page of the tokens that the sequence has; None if they do not fill it."""
        if page >= sequence.num_tokens // sequence.table.page_tokens:
            return None
        return self._prefix(sequence).chain.reach(page + 1, sequence.token_ids)[page]

    def started(self, sequence: Sequence) -> None:
        """Its first step has been handed out: from now on its pages are its KV worker's too."""
        if sequence.scheduled_s is None:
            sequence.num_reused_tokens = sequence.num_cached_tokens
            counts = self.counts[sequence.request.model]
            counts.queries += sequence.num_tokens
            counts.hits += sequence.num_cached_tokens

    def note_filled(self, sequence: Sequence) -> None:
        """A step has ended well: the pages that it filled can be found from now on."""
        prefix = self._prefix(sequence)
        for page in range(len(prefix.filled), sequence.num_cached_tokens // sequence.table.page_tokens):
            key = prefix.chain.reach(page + 1, sequence.token_ids)[page]
            model, pages = sequence.request.model, sequence.table.pages
            prefix.filled.append(self.cache.insert(model, key, pages[page], sequence.sequence_id))

    def leave(self, sequence: Sequence, pages: Items[Page]) -> list[Page]:
        """An ended sequence leaves its block table; gives those of `pages` that are of no use to others.

        Its budget's claim is closed already.
        """
        prefix, model = self._prefix(sequence), sequence.request.model
        free = list(pages[len(prefix.filled) :])
        for index in reversed(range(len(prefix.filled))):  # so that the first page is the youngest
            cached = prefix.filled[index]
            if cached is not None:
                self.remove_user(cached, sequence.sequence_id)
            elif not self.keep(model, prefix.chain.keys[index], pages[index]):
                free.append(pages[index])
        prefix.filled.clear()
        return free

    def keep(self, model: str, key: bytes, page: Page) -> bool:
        """Keep a full page that its sequence leaves; False where another page has the same tokens, which then stays."""
        twin = self.cache.get(model, key)
        if twin is None:
            self.cache.insert(model, key, page, None)
            return True
        self.cache.touch(twin)
        return False

    def add_user(self, found: Items[CachedPage], sequence_id: int) -> None:
        """A sequence uses the pages from now on; who had one of them alone shares it."""
        self._share(found)
        for page in found:
            self.cache.add_user(page, sequence_id)

    def remove_user(self, cached: CachedPage, sequence_id: int) -> None:
        """A sequence uses the page no more; the last one left then has it alone."""
        self.cache.remove_user(cached, sequence_id)
        if len(cached.users) == 1:
            self._budget.share(next(iter(cached.users)), -self._models[cached.model].frames_per_page)

    def chain(self, sequence: Sequence) -> PrefixChain:
        """The keys of the sequence's pages."""
        return self._prefix(sequence).chain

    def make_room(self, model: str, num_frames: int) -> None:
        """Evict reusable pages, oldest first, until the model can get the `num_frames` that it was granted.

        Live sequences may be beyond limits that were set below what they hold; reusable pages never add to that.
        """
        limits, pool = self._budget.limits, self._pool
        while pool.used(model) + num_frames > limits.ceiling(model) and self._evict(self.cache.oldest([model])):
            pass
        withheld = pool.budget - limits.budget
        while pool.num_free < withheld + num_frames and self._evict(self._oldest(model)):
            pass
        assert pool.num_free >= num_frames, f"{num_frames} frames were granted to {model} that nobody can give"

    def hold_to_limits(self) -> None:
        """Evict what limits that were just set leave no place for."""
        for model in self.counts:
            self.make_room(model, 0)

    def _evict(self, cached: CachedPage | None) -> bool:
        if cached is None:
            return False
        if self.tier is not None and self._models[cached.model].kv_split == "one":
            self.tier.stow(cached.model, cached.key, cached.page)
        self._pool.free(cached.model, [self.cache.evict(cached)])
        self.counts[cached.model].evictions += 1
        return True

    def _oldest(self, model: str) -> CachedPage | None:
        """The page that goes first to make room for `model`: not one of a floor, unless nothing else is left."""
        oldest = self.cache.oldest(self.counts)
        if oldest is None or self._may_lose(oldest.model, model):
            return oldest
        return self.cache.oldest([name for name in self.counts if self._may_lose(name, model)]) or oldest

    def _may_lose(self, name: str, model: str) -> bool:
        left = self._pool.used(name) - self._models[name].frames_per_page
        return name == model or left >= self._budget.limits.floor(name)

    def _prefix(self, sequence: Sequence) -> SequencePrefix:
        if sequence.prefix is None:
            sequence.prefix = SequencePrefix(self._chain(sequence))
        return sequence.prefix

    def _chain(self, sequence: Sequence) -> PrefixChain:
        """Its own, or with the keys that the newest one has where the prompt is the same, as with `n` above 1."""
        request, newest = sequence.request, self._newest
        if newest is not None and newest[0] == (request.model, request.cache_salt, request.prompt_token_ids):
            return newest[1].fork(len(request.prompt_token_ids) // sequence.table.page_tokens)
        chain = PrefixChain(request.model, request.cache_salt, sequence.table.page_tokens)
        self._newest = (request.model, request.cache_salt, request.prompt_token_ids), chain
        return chain

    def _share(self, found: Items[CachedPage], sign: int = 1) -> None:
        """Move pages that one sequence has alone from its claim into the shared one; `sign` -1 moves them back."""
        for owner, count in Counter(next(iter(page.users)) for page in found if len(page.users) == 1).items():
            self._budget.share(owner, sign * count * self._width(found))

    def _width(self, found: Items[CachedPage]) -> int:
        return self._models[found[0].model].frames_per_page if found else 0
