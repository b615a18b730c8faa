"""MappedPage and ModelRange: what the mapper knows of one page's spot, and of one model's addresses."""

from dataclasses import dataclass, field
from enum import Enum

from crosspool.kv_pool.pool import Page


class PageState(Enum):
    """From wanted to mapped and back. The driver works on a page while it is MAPPING or UNMAPPING."""

    WANTED = "wanted"
    MAPPING = "mapping"
    MAPPED = "mapped"
    UNMAPPING = "unmapping"
    GONE = "gone"  # forgotten; a page of the same frames is another object


@dataclass(eq=False, slots=True)
class ModelRange:
    """The addresses of one model: numbered spots for as many pages as can be mapped, behind one frame for frame 0."""

    model: str
    base: int
    frames_per_page: int
    free_spots: list[int]
    pages: dict[Page, "MappedPage"] = field(default_factory=dict)

    def first_frame(self, spot: int) -> int:
        """The range's frame with which a spot begins."""
        return 1 + spot * self.frames_per_page


@dataclass(eq=False, slots=True)
class MappedPage:
    """One page in one model's range.

    spot: its number in the range, while the driver works on it or it is mapped. users: sequences; a page with any
    stays. released_at: the epoch in which the last one left. is_doomed: to be unmapped as soon as nothing can touch it.
    is_urgent: a step waits. error: why the driver gave up on it.
    """

    model_range: ModelRange
    page: Page
    state: PageState = PageState.WANTED
    spot: int = -1
    users: set[int] = field(default_factory=set)
    released_at: int = 0
    is_urgent: bool = False
    is_doomed: bool = False
    failures: int = 0
    not_before_s: float = 0.0
    error: str | None = None

    @property
    def is_mapped(self) -> bool:
        return self.state is PageState.MAPPED

    @property
    def frames(self) -> Page:
        """Frames of the model's range, in the order of the page's own."""
        first = self.model_range.first_frame(self.spot)
        return tuple(range(first, first + self.model_range.frames_per_page))
