"""PrefixChain: the keys under which one sequence's full pages can be found by others."""

import json
from array import array
from collections.abc import Callable, Sequence
from copy import copy
from hashlib import blake2b

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
