"""What the server needs of an engine. `engine.async_engine.AsyncEngine` is the real one; tests script a fake."""

from typing import Protocol

from crosspool.engine.limit_change import LimitChange
from crosspool.engine.output import RequestOutput
from crosspool.engine.request import GenerationRequest
from crosspool.engine.served_model import ServedModel
from crosspool.engine.stats import EngineStats, ModelInfo
from crosspool.engine.step_log import StepSpan
from crosspool.errors import UnknownModelError
from crosspool.server.errors import APIError


class OutputStream(Protocol):
    """Outputs of one accepted request; ends after the last of its n sequences. Left early, it must be closed."""

    async def take(self, timeout_s: float | None = None) -> list[RequestOutput] | None:
        """Every output that is here, waiting for one; [] when `timeout_s` passes first, None after the last."""
        ...

    async def aclose(self) -> None:
        """Abort the request unless it has ended."""
        ...


class EngineClient(Protocol):
    """Generation, the models and their numbers."""

    def generate(self, request: GenerationRequest) -> OutputStream:
        """Accept or refuse at once; a refusal is a CrossPoolError or a ValueError, and leaves nothing behind."""
        ...

    async def add_model(self, model: ServedModel) -> ModelInfo: ...

    async def remove_model(self, name: str, *, drain: bool = True) -> None: ...

    def set_limits(self, change: LimitChange) -> None:
        """Change what models may hold in the KV pool, at once. UnknownModelError, or ValueError for what cannot be."""
        ...

    def trim(self, model: str) -> int:
        """Give its cached pages that no request uses back to the pool; the number of frames. UnknownModelError."""
        ...

    def models(self) -> list[ModelInfo]: ...

    def model(self, name: str) -> ModelInfo: ...

    def stats(self) -> EngineStats: ...

    def steps_since(self, moment_s: float) -> list[StepSpan]: ...

    def check(self) -> None:
        """Raise a CrossPoolError if the engine no longer runs."""
        ...

    async def close(self, *, drain_s: float = 0.0) -> None: ...


def info_of(engine: EngineClient, name: str) -> ModelInfo:
    """What the engine says of a model that the server knows by name.

    Raises APIError, to come again, while the engine does not: models of a start are loaded one after another.
    """
    try:
        return engine.model(name)
    except UnknownModelError:
        raise APIError(
            503,
            f"model {name} is not loaded: its turn has not come yet, or it is just being removed; try again later",
            code="model_not_ready",
            param="model",
            headers={"Retry-After": "2"},
        ) from None
