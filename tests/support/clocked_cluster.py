"""The simulated cluster behind the real Cluster protocol, on the real clock: for tests of the engine thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from crosspool.cluster.base import Event, LoadProgress, ModelFailed, ModelPlacement, ModelReady
from crosspool.engine.served_model import ServedModel
from crosspool.scheduler.step import StepDescriptor
from tests.support.simulated_cluster import SimulatedCluster


class ClockedCluster:
    """Loads at once, except models named in `broken`. `step_s` sets every step's duration."""

    def __init__(self, models: Sequence[ServedModel], *, num_frames: int, step_s: float = 0.0005) -> None:
        self.sim = SimulatedCluster(models, num_frames=num_frames, seed=0)
        self.sim.durations = {model.name: step_s for model in models}
        self.broken: dict[str, str] = {}
        self.removed: list[str] = []
        self.let_go: list[int | str] = []  # sequences that were forgotten and models that were removed, in order
        self.first: list[str] = []  # models that ranks should load before others
        self.loses_ranks: set[str] = set()  # of them, those whose load ends a rank
        self.closed = False
        self.num_polls = 0
        self._changed = threading.Condition()
        self._woken = False
        self._is_held = False
        self._losses: list[tuple[str, float | None]] = []
        self._events: list[Event] = []

    def add_model(self, placement: ModelPlacement) -> None:
        if placement.name in self.broken:
            is_loss = placement.name in self.loses_ranks
            self._emit(ModelFailed(name=placement.name, error=self.broken[placement.name], is_loss=is_loss))
            return
        self._emit(LoadProgress(name=placement.name, rank="w0", loaded_bytes=50, total_bytes=100))
        self._emit(ModelReady(name=placement.name, seconds=0.1, bytes_by_rank={"kv0": 20, "w0": 100}))

    def remove_model(self, name: str) -> None:
        self.removed.append(name)
        self.let_go.append(name)

    def load_first(self, models: Sequence[str]) -> None:
        self.first = list(models)

    def submit(self, step: StepDescriptor) -> None:
        with self._changed:
            self.sim.submit(step, time.monotonic())

    def forget(self, kv_rank: str, sequence_ids: Sequence[int]) -> None:
        with self._changed:
            self.sim.forget(kv_rank, sequence_ids)
            self.let_go += sequence_ids

    def poll(self, timeout_s: float) -> list[Event]:
        self.num_polls += 1
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                now = time.monotonic()
                while self._losses:
                    rank, back_in_s = self._losses.pop(0)
                    self.sim.lose(rank, now, back_in_s)
                events = self._events + ([] if self._is_held else self.sim.due(now))
                self._events = []
                if events or self._woken or now >= deadline:
                    self._woken = False
                    return events
                next_s = None if self._is_held else self.sim.next_event_s()
                self._changed.wait((deadline if next_s is None else min(deadline, next_s)) - now)

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    @contextmanager
    def held(self) -> Iterator[None]:
        """No step ends meanwhile, so that what runs goes on running."""
        self._hold(True)
        try:
            yield
        finally:
            self._hold(False)

    def lose(self, rank: str, back_in_s: float | None) -> None:
        """From the next poll on, which tells it: `sim` takes no step that needs what the engine was told is lost."""
        with self._changed:
            self._losses.append((rank, back_in_s))
            self._changed.notify_all()

    def memory_bytes(self) -> dict[str, dict[str, int]]:
        return {"kv0": {"kv_cache": 1}}

    def close(self) -> None:
        self.closed = True

    def _hold(self, is_held: bool) -> None:
        with self._changed:
            self._is_held = is_held
            self._changed.notify_all()

    def _emit(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()
