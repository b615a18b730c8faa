"""PageSpots: the ranges of models, and which page has each frame: by claim, and in whose spot it is mapped. Pure.

A frame is mapped in one spot at a time, so contents go with frames, never with addresses.
"""

from collections.abc import Collection, Iterator

from crosspool.kv_pool.backing.mapped_page import MappedPage, ModelRange, PageState
from crosspool.kv_pool.pool import Page


class PageSpots:
    """Spots of all pages of one KV rank."""

    def __init__(self) -> None:
        self.ranges: dict[str, ModelRange] = {}
        self.retired: list[ModelRange] = []  # of removed models, to be freed once they are empty
        self._claims: dict[int, MappedPage] = {}  # by frame: the page that has it now, mapped or not
        self._at: dict[int, MappedPage] = {}  # by frame: the page in whose spot it is mapped

    @property
    def mapped_frames(self) -> Collection[int]:
        return self._at.keys()

    def mapped(self) -> list[MappedPage]:
        """Every page that has a spot, those of removed models included."""
        return list({id(page): page for page in self._at.values()}.values())

    def idle(self) -> Iterator[MappedPage]:
        """Mapped pages that nobody uses and that are to stay."""
        for model_range in self.ranges.values():
            for page in model_range.pages.values():
                if page.is_mapped and not page.users and not page.is_doomed:
                    yield page

    def add_range(self, model: str, base: int, frames_per_page: int, num_spots: int) -> ModelRange:
        """Raises ValueError for a second model of that name."""
        if model in self.ranges:
            raise ValueError(f"model {model} has a range already; remove it first")
        self.ranges[model] = ModelRange(model, base, frames_per_page, list(range(num_spots - 1, -1, -1)))
        return self.ranges[model]

    def retire_range(self, model: str) -> ModelRange | None:
        model_range = self.ranges.pop(model, None)
        if model_range is not None:
            self.retired.append(model_range)
        return model_range

    def owner(self, frame: int) -> MappedPage | None:
        """The page that has the frame now."""
        return self._claims.get(frame)

    def others(self, model_range: ModelRange, page: Page) -> list[MappedPage]:
        """Pages that have some of the frames of this page of a model: of other frames, or of another model."""
        owners = (self._claims.get(frame) for frame in page)
        found = (owner for owner in owners if owner is not None)
        return list(
            {id(owner): owner for owner in found if owner.model_range is not model_range or owner.page != page}.values()
        )

    def claim(self, page: MappedPage) -> None:
        for frame in page.page:
            self._claims[frame] = page

    def blockers(self, page: MappedPage) -> list[MappedPage]:
        """Pages in whose spots some of the page's frames are mapped, in the order of its own."""
        found = (self._at.get(frame) for frame in page.page)
        return list({id(other): other for other in found if other is not None}.values())

    def is_blocked(self, page: MappedPage) -> bool:
        """Whether some of the page's frames are mapped in another spot."""
        return any(self._at.get(frame, page) is not page for frame in page.page)

    def occupy(self, page: MappedPage) -> None:
        """Give the page a spot: the driver is about to map it there."""
        page.spot = page.model_range.free_spots.pop()
        for frame in page.page:
            self._at[frame] = page

    def vacate(self, page: MappedPage) -> None:
        page.model_range.free_spots.append(page.spot)
        page.spot = -1
        for frame in page.page:
            del self._at[frame]

    def drop(self, page: MappedPage) -> None:
        """Forget a page that has no spot."""
        page.state = PageState.GONE
        if page.model_range.pages.get(page.page) is page:
            del page.model_range.pages[page.page]
        for frame in page.page:
            if self._claims.get(frame) is page:
                del self._claims[frame]
