"""KVPool: the frames of one KV rank, handed out as pages to all its models from one budget."""

from collections.abc import Iterable

Page = tuple[int, ...]
"""The frames of `page_tokens` tokens of all layers of one model; the entry of a block table."""


class KVPool:
    """Counts and owners of frames; holds no memory itself (`backing.py` and the workers do).

    Frame 0 is never handed out: masked lanes read and write it. A frame has one owner at a time; a page is made of
    any free frames, so the pool does not fragment. A full pool is a scheduling outcome: `allocate` then returns None.
    """

    def __init__(self, num_frames: int, first_frame: int = 0) -> None:
        """first_frame: number of the rank's frame 0, where several ranks number their frames one after another."""
        if num_frames < 2:
            raise ValueError(f"a KV pool of {num_frames} frames has none to hand out beside frame 0; give it 2 or more")
        self.num_frames = num_frames
        frames = range(first_frame + num_frames - 1, first_frame, -1)
        self._free = list(frames)  # a stack: frames in recent use are handed out first
        self._owner: dict[int, str] = {}
        self._frames_per_page: dict[str, int] = {}
        self._used: dict[str, int] = {}

    @property
    def budget(self) -> int:
        """Frames that can be handed out: all but frame 0."""
        return self.num_frames - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def used(self, model: str) -> int:
        """Frames in the model's pages."""
        return self._used[model]

    def add_model(self, model: str, frames_per_page: int) -> None:
        """Raises ValueError for a second model of that name or a page of no frames."""
        if model in self._frames_per_page:
            raise ValueError(f"the KV pool already has a model {model}; remove it first")
        if frames_per_page < 1:
            raise ValueError(f"a page of {model} has {frames_per_page} frames; it must have at least 1")
        self._frames_per_page[model] = frames_per_page
        self._used[model] = 0

    def remove_model(self, model: str) -> None:
        """Raises ValueError while the model holds pages."""
        if self._used[model]:
            raise ValueError(f"model {model} still holds {self._used[model]} frames; free its pages first")
        del self._frames_per_page[model], self._used[model]

    def allocate(self, model: str, num_pages: int) -> tuple[Page, ...] | None:
        """`num_pages` pages for the model, or None (and nothing taken) if not all of them are free."""
        width = self._frames_per_page[model]
        if num_pages * width > len(self._free):
            return None
        pages = tuple(tuple(self._free.pop() for _ in range(width)) for _ in range(num_pages))
        for page in pages:
            for frame in page:
                assert frame not in self._owner, f"frame {frame} handed out twice"
                self._owner[frame] = model
        self._used[model] += num_pages * width
        return pages

    def free(self, model: str, pages: Iterable[Page]) -> None:
        """Take pages back. No step in flight may use them."""
        for page in pages:
            for frame in page:
                owner = self._owner.pop(frame, None)
                assert owner == model, f"{model} frees frame {frame}, which belongs to {owner}"
                self._free.append(frame)
            self._used[model] -= len(page)
