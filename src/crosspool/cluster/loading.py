"""Loads of models beside the running lanes: each in a thread of its own, so that no model waits for another's load."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from crosspool.cluster.messages import AddModel, FromRank, Loaded, LoadFailed, Loading
from crosspool.cluster.worker import LoadsModels

Start = Callable[[Callable[[], None], str], None]
"""Runs a function, now or in a thread of the given name."""

PROGRESS_STEPS = 100
"""Most `Loading` messages of one load."""


class LoadCancelledError(Exception):
    """Raised out of a worker's progress callback, so that the load ends as any failed one does."""


@dataclass(slots=True)
class _Load:
    request: AddModel
    cancelled: bool = False
    loaded_bytes: int = 0
    told_bytes: int = -1
    next: list[AddModel] = field(default_factory=list)  # the same name, asked for again meanwhile


class Loader:
    """Runs `add_model` of one worker. Outcomes are collected by the rank's loop; `wake` tells it that there are some.

    A worker's `add_model` thus runs while its half steps run in another thread, and for several models at once: it
    builds a model aside and publishes it with one assignment.
    """

    def __init__(self, worker: LoadsModels, start: Start, wake: Callable[[], None]) -> None:
        self._worker = worker
        self._start = start
        self._wake = wake
        self._loads: dict[str, _Load] = {}
        self._told: deque[Loading] = deque()
        self._ended: deque[tuple[_Load, str | None]] = deque()

    def add(self, request: AddModel) -> None:
        """Begin a load, after a cancelled one of the same name has ended."""
        running = self._loads.get(request.placement.name)
        if running is not None:
            running.next.append(request)
            return
        load = _Load(request)
        self._loads[request.placement.name] = load
        self._start(lambda: self._run(load), f"load-{request.placement.name}")

    def cancel(self, model: str) -> bool:
        """Give up the model's load; False if none is under way."""
        load = self._loads.get(model)
        if load is None:
            return False
        load.cancelled = True
        load.next.clear()
        return True

    def cancel_all(self) -> None:
        for model in tuple(self._loads):
            self.cancel(model)

    @property
    def is_busy(self) -> bool:
        return bool(self._loads)

    def has_outcomes(self) -> bool:
        return bool(self._told or self._ended)

    def outcomes(self) -> list[FromRank]:
        """What has happened since the last call. What was cancelled when all but loaded is removed again."""
        messages: list[FromRank] = [self._told.popleft() for _ in range(len(self._told))]
        while self._ended:
            load, error = self._ended.popleft()
            name = load.request.placement.name
            del self._loads[name]
            if error is None and load.cancelled:
                self._worker.remove_model(name)
                error = "given up"
            if error is None:
                messages.append(Loaded(name, load.request.load_id, load.loaded_bytes))
            else:
                messages.append(LoadFailed(name, load.request.load_id, error))
            for request in load.next:
                self.add(request)
        return messages

    def _run(self, load: _Load) -> None:
        def progress(loaded_bytes: int, total_bytes: int) -> None:
            if load.cancelled:
                raise LoadCancelledError(f"the load of {load.request.placement.name} was given up")
            load.loaded_bytes = loaded_bytes
            if loaded_bytes >= total_bytes or loaded_bytes - load.told_bytes >= total_bytes / PROGRESS_STEPS:
                load.told_bytes = loaded_bytes
                request = load.request
                self._told.append(Loading(request.placement.name, request.load_id, loaded_bytes, total_bytes))
                self._wake()

        error = None
        try:
            self._worker.add_model(load.request.placement, progress)
        except Exception as failure:  # whatever a model's files make a loader raise ends that load only
            error = one_line(failure)
        self._ended.append((load, error))
        self._wake()


def one_line(failure: BaseException) -> str:
    """An exception as one line that names its kind."""
    text = " ".join(str(failure).split())
    return f"{type(failure).__name__}: {text}" if text else type(failure).__name__


class LoadThreads:
    """A `Start` that gives each load a daemon thread, and can wait for all of them."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def __call__(self, run: Callable[[], None], name: str) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, until_s: float) -> bool:
        """Wait up to `until_s` (time.monotonic) for loads, which end soon once cancelled; False if one goes on."""
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
