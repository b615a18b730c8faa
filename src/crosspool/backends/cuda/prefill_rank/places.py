"""Places: a prefill rank's device memory for whole models, more of which live on its host than fit here at once.

A model that comes gets a place of its own while there is room, that of smaller places included, since a larger one can
hold their models too. After that models take turns in places that are large enough. Places are made while models load,
never within a step.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from crosspool.units import GiB


@dataclass(eq=False)
class Place:
    """One allocation. model: whose weights lie here, or are on their way. used: when it was last taken.

    held: what its user keeps of them; it goes with the place.
    """

    memory: torch.Tensor
    model: str | None = None
    used: int = 0
    is_busy: bool = False  # a chunk reads it
    held: Any = None

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes


class Places:
    """make: (bytes) uint8 of the device. settle: waits until no copy is under way. Any thread may call."""

    def __init__(
        self,
        rank: str,
        room_bytes: int,
        make: Callable[[int], torch.Tensor],
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank, self._room_bytes, self._make, self._settle = rank, room_bytes, make, settle
        self._places: list[Place] = []
        self._ticks = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return sum(place.num_bytes for place in tuple(self._places))

    def models(self) -> tuple[str, ...]:
        """Those in place."""
        return tuple(place.model for place in tuple(self._places) if place.model is not None)

    def make_room(self, model: str, num_bytes: int) -> bool:
        """See that some place can hold the model; False where a chunk is in the way, and it is to be asked again.

        Raises ValueError where the room is too small for it.
        """
        if num_bytes > self._room_bytes:
            raise ValueError(
                f"{self._rank}: {model} takes {num_bytes / GiB:.1f} GiB whole and prefill_pool_bytes is "
                f"{self._room_bytes / GiB:.1f} GiB; set at least {num_bytes / GiB:.1f} GiB, or prefill inline"
            )
        with self._lock:
            while self.num_bytes + num_bytes > self._room_bytes:
                idle = [place for place in self._places if not place.is_busy and place.num_bytes < num_bytes]
                could_be = self.num_bytes - sum(place.num_bytes for place in idle) + num_bytes
                if could_be > self._room_bytes and any(place.num_bytes >= num_bytes for place in self._places):
                    return True  # takes turns
                if not idle:
                    return False
                self._settle()
                self._places.remove(min(idle, key=lambda place: place.num_bytes))
            self._places.append(Place(self._make(num_bytes)))
            return True

    def take(self, model: str, num_bytes: int) -> tuple[Place, bool]:
        """A place for the model, busy from now on, and whether its weights lie there, or are on their way, already."""
        with self._lock:
            place = self._held_by(model)
            is_in_place = place is not None
            if place is None:
                place = self._oldest(num_bytes)
                assert place is not None, f"{self._rank}: no place for {model}"
                place.model = model
            self._ticks += 1
            place.used, place.is_busy = self._ticks, True
            return place, is_in_place

    def spare(self, model: str, num_bytes: int, *, may_replace: bool = True) -> Place | None:
        """A place for a model that comes next, beside the busy one; None where there is none, or it is in place.

        may_replace: whether another model may have to leave for it.
        """
        with self._lock:
            if self._held_by(model) is not None:
                return None
            place = self._oldest(num_bytes)
            if place is not None and place.model is not None and not may_replace:
                return None
            if place is not None:
                self._ticks += 1
                place.model, place.used = model, self._ticks
            return place

    def release(self, place: Place) -> None:
        """No kernel reads it any more."""
        place.is_busy = False

    def forget(self, model: str) -> None:
        """The model is gone; its place is free for others."""
        with self._lock:
            place = self._held_by(model)
            if place is not None:
                self._settle()
                place.model = None

    def _held_by(self, model: str) -> Place | None:
        return next((place for place in self._places if place.model == model), None)

    def _oldest(self, num_bytes: int) -> Place | None:
        fitting = [place for place in self._places if place.num_bytes >= num_bytes and not place.is_busy]
        return min(fitting, key=lambda place: (place.model is not None, place.used, place.num_bytes), default=None)
