"""HostTier: pages that the prefix cache gave up, kept in frames of host memory under their keys. Pure bookkeeping.

A page is *stowed* when the cache gives its frames to others, and *brought back* into new frames when a sequence comes
whose next tokens it holds; it stays here meanwhile, until others need its place. The page that was stowed or brought
back least lately goes first, of all models. Contents move by `FrameCopy`s, which the KV rank carries out in their
order, before any step that is handed out after them: so none has to be waited for here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from crosspool.kv_pool.pool import KVPool, Page


@dataclass(frozen=True, slots=True)
class FrameCopy:
    """Copy a page's frames to host frames (is_stowed), or back. Frames are numbered as in block tables."""

    frames: Page
    host_frames: Page
    is_stowed: bool


@dataclass(slots=True)
class TierCounts:
    """Of one model since it was added, in pages."""

    stowed: int = 0
    brought_back: int = 0


class HostTier:
    """The stowed pages of one KV rank."""

    def __init__(self, num_frames: int) -> None:
        """num_frames: of host memory, frame 0 included, which is never used."""
        self.counts: dict[str, TierCounts] = {}
        self._pool = KVPool(num_frames)
        self._pages: dict[tuple[str, bytes], Page] = {}  # the least lately used first
        self._kept: set[tuple[str, bytes]] = set()
        self._copies: list[FrameCopy] = []

    @property
    def budget(self) -> int:
        """Frames that can hold pages."""
        return self._pool.budget

    def add_model(self, model: str, frames_per_page: int) -> None:
        self._pool.add_model(model, frames_per_page)
        self.counts[model] = TierCounts()

    def remove_model(self, model: str) -> None:
        self.forget(model)
        self._pool.remove_model(model)
        del self.counts[model]

    def forget(self, model: str) -> None:
        """Drop the model's pages."""
        for owner, key in [found for found in self._pages if found[0] == model]:
            self._drop(owner, key)

    def clear(self) -> None:
        """The rank has lost its memory, this one too: nothing is stowed, and no copy is worth making."""
        for model in self.counts:
            self.forget(model)
        self._kept.clear()
        self._copies.clear()

    def num_frames(self, model: str) -> int:
        """Frames of the model's stowed pages."""
        return self._pool.used(model)

    def stow(self, model: str, key: bytes, page: Page) -> bool:
        """Hold a page that is about to lose its frames; False where it is here already, or there is no place for it."""
        if (model, key) in self._pages:
            self._touch(model, key)
            return False
        while (found := self._pool.allocate(model, 1)) is None:
            oldest = next((each for each in self._pages if each not in self._kept), None)
            if oldest is None:
                return False
            self._drop(*oldest)
        self._pages[model, key] = found[0]
        self._copies.append(FrameCopy(page, found[0], is_stowed=True))
        self.counts[model].stowed += 1
        return True

    def num_known(self, model: str, keys: Iterable[bytes]) -> int:
        """How many of `keys` are here, up to the first that is not."""
        count = 0
        for key in keys:
            if (model, key) not in self._pages:
                break
            count += 1
        return count

    def keep(self, model: str, keys: list[bytes]) -> None:
        """These pages are about to be brought back: they stay until the next call. Of them the first is youngest."""
        self._kept = {(model, key) for key in keys}
        for key in reversed(keys):
            self._touch(model, key)

    def bring_back(self, model: str, key: bytes, page: Page) -> None:
        """Copy a page that is here into `page`, whose frames no step uses."""
        self._copies.append(FrameCopy(page, self._pages[model, key], is_stowed=False))
        self.counts[model].brought_back += 1

    def take_copies(self) -> tuple[FrameCopy, ...]:
        """What has to be copied, in this order, before any step that is handed out from now on."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def _touch(self, model: str, key: bytes) -> None:
        self._pages[model, key] = self._pages.pop((model, key))

    def _drop(self, model: str, key: bytes) -> None:
        self._kept.discard((model, key))
        self._pool.free(model, [self._pages.pop((model, key))], was_used=False)
