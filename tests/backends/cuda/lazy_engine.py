"""A copy engine without a GPU: copies wait until the test lets them go on."""

from __future__ import annotations

import ctypes
import random

import numpy as np


class LazyEngine:
    """Copies when it is asked to go on, those of a batch in an order of its own."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._batches: list[list[tuple[int, int, int]]] = []
        self.num_ended = 0

    def enqueue(self, targets, sources, num_bytes):
        assert targets.dtype == sources.dtype == np.uint64
        copies = [(int(target), int(source), num_bytes) for target, source in zip(targets, sources, strict=True)]
        self._rng.shuffle(copies)
        self._batches.append(copies)
        number = len(self._batches)
        return lambda: self.num_ended >= number

    @property
    def num_enqueued(self) -> int:
        """Batches, those that have ended too."""
        return len(self._batches)

    def go_on(self) -> bool:
        """Carry out one more batch, if there is one."""
        if self.num_ended == len(self._batches):
            return False
        for target, source, num_bytes in self._batches[self.num_ended]:
            ctypes.memmove(target, source, num_bytes)
        self.num_ended += 1
        return True
