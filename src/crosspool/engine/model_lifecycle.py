"""ModelLifecycle: models of a running engine are loaded, drained, lost, removed. All under the engine's lock."""

import logging
from concurrent.futures import Future

from crosspool.cluster.base import Cluster, Event, LoadProgress, ModelFailed, ModelReady, RankLost, RankReady
from crosspool.engine.engine_core import EngineCore
from crosspool.engine.prefill_ranks import check_whole_model
from crosspool.engine.registry import ModelRegistry, RegisteredModel, outcome
from crosspool.engine.sequence import SequenceUpdate
from crosspool.engine.served_model import ServedModel
from crosspool.engine.stats import ModelInfo
from crosspool.errors import CapacityError, CheckpointError, CrossPoolError, UnknownModelError, WorkerLostError

logger = logging.getLogger(__name__)


class ModelLifecycle:
    """Keeps registry, core and cluster at one: which models there are and what state each is in.

    `register`, `ready_model` and `retire` may come from any thread; the rest calls the cluster, so it is the engine
    thread's.
    """

    def __init__(self, core: EngineCore, cluster: Cluster, max_sequences: int) -> None:
        self.registry = ModelRegistry(max_sequences)
        self._core = core
        self._cluster = cluster
        self._lost_ranks: set[str] = set()

    def register(self, model: ServedModel) -> RegisteredModel:
        """Take a model in as loading.

        Raises ValueError for a taken name, CapacityError if the pool, or a prefill rank, cannot hold it.
        """
        others = [held.model for held in self.registry if held.info.state != "failed"]
        check_whole_model(model, others, self._core.config)
        return self.registry.add(model, self._core.context_limit(model), serving=model.name in self._core.live_models)

    def ready_model(self, name: str) -> ServedModel:
        """A model that takes requests (or is draining, which the core refuses). Raises UnknownModelError."""
        registered = self.registry.get(name)
        if registered.info.state == "loading":
            raise UnknownModelError(f"model {name} is still loading; try again when it is ready")
        if registered.info.state == "failed":
            raise UnknownModelError(f"model {name} failed to load: {registered.info.error}")
        return registered.model

    def retire(self, name: str) -> Future[None]:
        """Refuse new requests from now on; the future ends when the model is gone. Raises ValueError while it loads."""
        registered = self.registry.get(name)
        if registered.info.state == "loading":
            raise ValueError(f"model {name} is still loading; wait for it before removing it")
        if registered.removed is None:
            registered.removed = outcome()
        if registered.info.state == "ready":
            self.registry.update(name, state="draining")
            self._core.drain_model(name)
        return registered.removed

    def load(self, model: ServedModel) -> None:
        logger.info("loading model %s from %s", model.name, model.directory)
        try:
            self._cluster.add_model(model.placement)
        except ValueError as error:  # it names a rank that there is not
            self.registry.update(model.name, state="failed", error=str(error))
            self.registry.get(model.name).added.set_exception(error)

    def end(self, name: str, error: CrossPoolError, now: float) -> list[SequenceUpdate]:
        """End the model's requests with `error`, if it still has any."""
        return self._core.end_model(name, error, now) if name in self._core.live_models else []

    def on_event(self, event: Event, now: float) -> list[SequenceUpdate]:
        """Events of models that have been removed meanwhile are of no interest."""
        match event:
            case LoadProgress():
                self.registry.progress(event)
            case ModelReady(name=name) if name in self.registry:
                return self._ready(event, now)
            case ModelFailed(name=name, error=error, is_loss=is_loss) if name in self.registry:
                return self._failed(name, WorkerLostError(error) if is_loss else CheckpointError(error), now)
            case RankLost(rank=rank):
                self._lost_ranks.add(rank)
            case RankReady(rank=rank) if rank in self._lost_ranks:
                self._lost_ranks.discard(rank)
                self._loaded_again(rank)
            case _:
                pass
        return []

    def remove_drained(self) -> None:
        """Free models that are to be removed, or were lost, once nothing of them is in flight."""
        for registered in self.registry:
            name, state = registered.model.name, registered.info.state
            leaving = registered.removed is not None or state == "failed"
            if leaving and name in self._core.live_models and self._core.is_idle(name):
                self._core.remove_model(name)
                if state != "failed":  # nothing of a failed model is left on any rank
                    self._cluster.remove_model(name)
            if registered.removed is not None and name not in self._core.live_models:
                self.registry.remove(name)
                self.tell_contexts()  # its floor is free for the others
                registered.removed.set_result(None)

    def give_up(self, error: CrossPoolError) -> None:
        """The engine ends: nobody may go on waiting for a model to come or go."""
        for registered in self.registry:
            for future in (registered.added, registered.removed):
                if future is not None and not future.done():
                    future.set_exception(error)

    def infos(self) -> list[ModelInfo]:
        return self.registry.infos()

    def tell_contexts(self) -> None:
        """Bring every served model's context limit up to date with the limits of the pool."""
        for registered in self.registry:
            if registered.model.name in self._core.live_models:
                self.registry.update(registered.model.name, context_limit=self._core.context_limit(registered.model))

    def _ready(self, event: ModelReady, now: float) -> list[SequenceUpdate]:
        registered = self.registry.get(event.name)
        if registered.info.state != "loading":
            return []
        try:
            self._core.add_model(registered.model)
        except CapacityError as error:  # limits have changed since it was registered
            self._cluster.remove_model(event.name)
            return self._failed(event.name, error, now)
        self.tell_contexts()
        total = sum(event.bytes_by_rank.values())
        info = self.registry.update(
            event.name,
            state="ready",
            load_s=event.seconds,
            bytes_by_rank=dict(event.bytes_by_rank),
            loaded_bytes=total,
            total_bytes=total,
            moved_bytes=total,
        )
        logger.info("model %s is ready after %.2f s: %d bytes", event.name, event.seconds, total)
        registered.added.set_result(info)
        return self._core.refuse_unfitting(now)  # its floor may be what they waited for

    def _loaded_again(self, rank: str) -> None:
        """A rank that was lost holds its models again."""
        for registered in self.registry:
            info = registered.info
            if again := info.bytes_by_rank.get(rank, 0):
                self.registry.update(info.name, moved_bytes=info.moved_bytes + again)

    def _failed(self, name: str, error: CrossPoolError, now: float) -> list[SequenceUpdate]:
        """A model that did not load, or not again after a rank's return: then its requests end with the error."""
        logger.error("model %s failed: %s", name, error)
        registered = self.registry.get(name)
        self.registry.update(name, state="failed", error=str(error))
        if not registered.added.done():
            registered.added.set_exception(error)
        return self.end(name, WorkerLostError(f"model {name} was lost: {error}"), now)
