"""BlockTable: the pages of one sequence, and which of them its KV worker has been told of."""

from crosspool.kv_pool.pool import Page
from crosspool.units import ceil_div


class BlockTable:
    """Page i holds the slots of tokens `i * page_tokens` up to the next page's first."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.pages: list[Page] = []
        self._num_sent = 0

    def num_missing(self, num_tokens: int) -> int:
        """Pages to add before `num_tokens` tokens have slots."""
        return max(0, ceil_div(num_tokens, self.page_tokens) - len(self.pages))

    def extend(self, pages: tuple[Page, ...]) -> None:
        self.pages.extend(pages)

    def take_unsent(self) -> tuple[int, tuple[Page, ...]]:
        """(index of the first, pages) added since the last call: what the next step's row carries."""
        first = self._num_sent
        self._num_sent = len(self.pages)
        return first, tuple(self.pages[first:])

    def resend_from(self, index: int) -> None:
        """The KV worker has not taken in pages from `index` on: the next row carries them again."""
        self._num_sent = min(self._num_sent, index)

    def replace(self, index: int, pages: list[Page]) -> list[Page]:
        """Put `pages` in the place of those from `index` on, which are returned. No row may have carried them."""
        assert self._num_sent <= index, f"page {index} has been sent; it cannot be another one any more"
        stop = index + len(pages)
        old, self.pages[index:stop] = self.pages[index:stop], pages
        return old

    def clear(self) -> list[Page]:
        """Empty the table and return its pages, for the pool."""
        pages, self.pages, self._num_sent = self.pages, [], 0
        return pages
