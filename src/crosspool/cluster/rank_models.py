"""RankModels: the models of one rank, their loads, and what it reports of its memory."""

from collections.abc import Callable

from crosspool.cluster import messages
from crosspool.cluster.base import ModelPlacement
from crosspool.cluster.loading import Loader, Start
from crosspool.cluster.messages import FromRank
from crosspool.cluster.worker import RankWorker
from crosspool.kv_pool.ahead import Hint
from crosspool.kv_pool.backing.base import BackingCounts


class RankModels:
    """Loads run in threads of their own; `tell` says what has become of them. `emit` takes what the parent is told."""

    def __init__(
        self, worker: RankWorker, start: Start, wake: Callable[[], None], emit: Callable[[FromRank], None]
    ) -> None:
        self._worker = worker
        self._emit = emit
        self._loader = Loader(worker.loads, start, wake)
        self.has_outcomes = self._loader.has_outcomes  # whether `tell` has something to tell
        self._loaded: set[str] = set()
        self._placements: dict[str, ModelPlacement] = {}
        self._told_counts: BackingCounts | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a model is loading."""
        return self._loader.is_busy

    def placement(self, model: str) -> ModelPlacement | None:
        return self._placements.get(model)

    def add(self, message: messages.AddModel) -> None:
        """Begin to load."""
        self._placements[message.placement.name] = message.placement
        self._loader.add(message)

    def remove(self, model: str) -> None:
        """Free the model; no step of it may be under way. A load of it is given up."""
        self._placements.pop(model, None)
        self._loader.cancel(model)
        if model in self._loaded:
            self._loaded.discard(model)
            self._worker.loads.remove_model(model)
            self.report_memory()

    def tell(self) -> None:
        """Tell what loads have come to."""
        for outcome in self._loader.outcomes():
            if not isinstance(outcome, messages.Loading):
                self.report_memory()
            if isinstance(outcome, messages.Loaded):
                self._loaded.add(outcome.model)
            self._emit(outcome)

    def map_ahead(self, hints: tuple[Hint, ...]) -> None:
        """Hand hints on, and report what mapping has done where that has changed."""
        mapping = self._worker.mapping
        if mapping is None:
            return
        mapping.hint(hints)
        counts = mapping.counts()
        if counts != self._told_counts:
            has_other_memory = self._told_counts is None or counts.absent_frames != self._told_counts.absent_frames
            self._told_counts = counts
            if has_other_memory:
                self.report_memory()
            self._emit(messages.BackingReport(counts))

    def report_memory(self) -> None:
        self._emit(messages.MemoryReport(dict(self._worker.loads.memory_bytes())))

    def close(self) -> None:
        """Give up every load."""
        self._loader.cancel_all()
