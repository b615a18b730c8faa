"""ModelRegistry: what callers see of each model from `add_model` to its removal."""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from crosspool.cluster.base import LoadProgress
from crosspool.engine.served_model import ServedModel
from crosspool.engine.stats import ModelInfo
from crosspool.errors import UnknownModelError
from crosspool.models.spec import MoEFFNSpec


@dataclass(slots=True)
class RegisteredModel:
    """A model and the callers that wait for it to be loaded or removed."""

    model: ServedModel
    info: ModelInfo
    added: Future[ModelInfo]
    removed: Future[None] | None = None


class ModelRegistry:
    """Models by name, in the order they were added. Guarded by the engine's lock."""

    def __init__(self, max_sequences: int) -> None:
        self._max_sequences = max_sequences
        self._models: dict[str, RegisteredModel] = {}
        self._loaded_by_rank: dict[str, dict[str, tuple[int, int]]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._models

    def __iter__(self) -> Iterator[RegisteredModel]:
        return iter(list(self._models.values()))

    def get(self, name: str) -> RegisteredModel:
        """Raises UnknownModelError, naming the models there are."""
        if name not in self._models:
            known = ", ".join(self._models) or "none"
            raise UnknownModelError(f"no model {name!r} is served; served models: {known}")
        return self._models[name]

    def infos(self) -> list[ModelInfo]:
        return [registered.info for registered in self._models.values()]

    def add(self, model: ServedModel, context_limit: int, *, serving: bool) -> RegisteredModel:
        """Raises ValueError for a name that is taken; that of a model that failed to load is free.

        A model that was lost after it had been ready is free once its requests have ended (`serving` is false).
        """
        taken = self._models.get(model.name)
        if taken is not None and taken.removed is not None:
            raise ValueError(f"model {model.name} is just being removed; add it again once it is gone")
        if taken is not None and (taken.info.state != "failed" or serving):
            raise ValueError(f"model {model.name} is already {taken.info.state}; remove it first or give another name")
        info = ModelInfo(
            name=model.name,
            state="loading",
            context_limit=context_limit,
            created_s=time.time(),
            max_sequences=self._max_sequences,
            kv_rank=model.kv_rank,
            kv_peers=model.kv_peers,
            kv_split=model.kv_split,
            weights_ranks=model.weights_ranks,
            prefill_ranks=model.prefill_ranks,
            kv_bytes_per_token=model.spec.kv_bytes_per_token(model.kv_dtype),
            experts_by_layer=tuple(
                layer.ffn.top_k if isinstance(layer.ffn, MoEFFNSpec) else 0 for layer in model.spec.layers
            ),
        )
        self._models[model.name] = registered = RegisteredModel(model, info, outcome())
        self._loaded_by_rank[model.name] = {}
        return registered

    def update(self, name: str, **changes: object) -> ModelInfo:
        registered = self._models[name]
        registered.info = replace(registered.info, **changes)  # type: ignore[arg-type]
        return registered.info

    def progress(self, event: LoadProgress) -> None:
        """Add up what each rank has loaded; progress of a model that has been removed meanwhile is of no interest."""
        if event.name in self._models:
            by_rank = self._loaded_by_rank[event.name]
            by_rank[event.rank] = (event.loaded_bytes, event.total_bytes)
            self.update(
                event.name,
                loaded_bytes=sum(loaded for loaded, _ in by_rank.values()),
                total_bytes=sum(total for _, total in by_rank.values()),
            )

    def remove(self, name: str) -> None:
        del self._models[name], self._loaded_by_rank[name]


def outcome() -> Future[Any]:
    """A future that its waiters cannot cancel: a caller that stops waiting does not stop the work."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
