"""PrefixCache: which full pages of one KV rank hold which tokens, who uses them, and which of them may go.

A page comes in once a step has wholly written it and is found by its key (`PrefixChain`). While sequences use it,
it stays. Without users it is *reusable*: it keeps its tokens until its frames are wanted for something else. Whoever
has been without users for longest goes first, and of one sequence the last page before the first, so that no page
outlasts one that it builds on. Frames are the pool's affair; nothing in here counts them.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from hashlib import blake2b

from crosspool.kv_pool.pool import Page

KEY_BYTES = 32
"""Keys are compared, tokens are not: with 256 bits nobody finds two prompts that share a key."""

TokensOf = Callable[[int, int], Sequence[int]]
"""The token ids at positions [start, stop) of a sequence."""


def root_key(model: str, salt: str | None) -> bytes:
    """What the first page's key is chained to: pages of other models and of other salts never have the same key."""
    return blake2b(json.dumps([model, salt]).encode(), digest_size=KEY_BYTES).digest()


def page_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of the page of `token_ids` behind the page with key `parent`: it stands for every token up to its end."""
    return blake2b(parent + array("i", token_ids).tobytes(), digest_size=KEY_BYTES).digest()


class PrefixChain:
    """Keys of a sequence's pages from its first token on, made as they are asked for.

    Token ids before the end of a page that has a key never change: a sequence only grows.
    """

    def __init__(self, model: str, salt: str | None, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.keys: list[bytes] = []
        self._root = root_key(model, salt)

    def reach(self, num_pages: int, tokens_of: TokensOf) -> list[bytes]:
        """The chain's keys, at least those of the first `num_pages` pages. All their tokens have to be known."""
        for page in range(len(self.keys), num_pages):
            token_ids = tokens_of(page * self.page_tokens, (page + 1) * self.page_tokens)
            assert len(token_ids) == self.page_tokens, f"page {page} is not full: it has {len(token_ids)} tokens"
            self.keys.append(page_key(self.keys[-1] if self.keys else self._root, token_ids))
        return self.keys

    def fork(self, num_pages: int) -> "PrefixChain":
        """One for another sequence of the model and salt whose first `num_pages` pages have the same tokens."""
        other = copy(self)
        other.keys = self.keys[:num_pages]
        return other


@dataclass(eq=False, slots=True)
class CachedPage:
    """A full page of `model`. users: sequences that have it in their block tables; none: it is reusable."""

    key: bytes
    model: str
    page: Page
    users: set[int] = field(default_factory=set)


class _ModelPages:
    """One model's pages by key, and the reusable ones by age, oldest first."""

    def __init__(self) -> None:
        self.by_key: dict[bytes, CachedPage] = {}
        self.reusable: dict[CachedPage, int] = {}  # to the moment, in events of the cache, its last user left


class PrefixCache:
    """Full pages of all models of one KV rank."""

    def __init__(self) -> None:
        self._models: dict[str, _ModelPages] = {}
        self._moment = 0

    def add_model(self, model: str) -> None:
        self._models[model] = _ModelPages()

    def remove_model(self, model: str) -> list[Page]:
        """Forget a model, none of whose pages may have users; they are for the pool to take back."""
        unused = self.clear(model)
        used = self._models.pop(model).by_key
        assert not used, f"{len(used)} pages of {model} still have users; end its sequences first"
        return unused

    def clear(self, model: str) -> list[Page]:
        """Forget a model's pages that nobody uses, for the pool to take back."""
        pages = self._models[model]
        dropped = list(pages.reusable)
        for cached in dropped:
            del pages.by_key[cached.key]
        pages.reusable.clear()
        return [cached.page for cached in dropped]

    def num_pages(self, model: str) -> int:
        return len(self._models[model].by_key)

    def num_reusable(self, model: str) -> int:
        """Pages of the model that nobody uses."""
        return len(self._models[model].reusable)

    def get(self, model: str, key: bytes) -> CachedPage | None:
        return self._models[model].by_key.get(key)

    def match(self, model: str, keys: Iterable[bytes]) -> list[CachedPage]:
        """The pages of `keys`, up to the first that is not here."""
        by_key = self._models[model].by_key
        found = []
        for key in keys:
            cached = by_key.get(key)
            if cached is None:
                break
            found.append(cached)
        return found

    def insert(self, model: str, key: bytes, page: Page, user: int | None) -> CachedPage | None:
        """Take in a page that has been wholly written; None if another page has the same tokens already.

        user: the sequence whose page it is; None: nobody's, it is reusable at once.
        """
        pages = self._models[model]
        if key in pages.by_key:
            return None
        cached = CachedPage(key, model, page)
        pages.by_key[key] = cached
        if user is None:
            self._rest(pages, cached)
        else:
            cached.users.add(user)
        return cached

    def add_user(self, cached: CachedPage, user: int) -> None:
        """One more sequence uses the page."""
        self._models[cached.model].reusable.pop(cached, None)
        cached.users.add(user)

    def remove_user(self, cached: CachedPage, user: int) -> None:
        """A sequence uses the page no more; without any it is reusable."""
        cached.users.remove(user)
        if not cached.users:
            self._rest(self._models[cached.model], cached)

    def touch(self, cached: CachedPage) -> None:
        """A sequence has just used tokens like those of the page, in a page of its own."""
        pages = self._models[cached.model]
        if pages.reusable.pop(cached, None) is not None:
            self._rest(pages, cached)

    def oldest(self, models: Iterable[str]) -> CachedPage | None:
        """Of these models' reusable pages the one that has been so for longest."""
        found: CachedPage | None = None
        found_moment = 0
        for model in models:
            reusable = self._models[model].reusable
            cached = next(iter(reusable), None)
            if cached is not None and (found is None or reusable[cached] < found_moment):
                found, found_moment = cached, reusable[cached]
        return found

    def evict(self, cached: CachedPage) -> Page:
        """Forget a reusable page, for the pool to take back."""
        pages = self._models[cached.model]
        del pages.reusable[cached], pages.by_key[cached.key]
        return cached.page

    def _rest(self, pages: _ModelPages, cached: CachedPage) -> None:
        self._moment += 1
        pages.reusable[cached] = self._moment
