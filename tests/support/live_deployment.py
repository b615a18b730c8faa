"""A whole deployment for tests: real engine, real workers, HTTP on a free port."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from crosspool.config import DeploymentConfig, ModelConfig
from crosspool.deployment.launch import start_engine
from crosspool.deployment.prepared_model import PreparedModel, catalogue, prepare_model, prepare_models
from crosspool.engine.async_engine import AsyncEngine
from crosspool.engine.stats import EngineStats
from crosspool.server.app import create_app
from tests.support.awaited import until
from tests.support.live_server import live_server


@dataclass(frozen=True, slots=True)
class LiveDeployment:
    url: str
    engine: AsyncEngine

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def left(self) -> tuple[int, int]:
        """Sequences that are queued, running or parked, and frames that are used or promised."""
        stats = self.stats()
        loads, pools = stats.models, stats.pools
        return (
            sum(load.num_queued + load.num_prefilling + load.num_decoding + load.num_parked for load in loads),
            sum(pool.frames_used + pool.frames_reserved for pool in pools),
        )

    def until_idle(self) -> None:
        """Nothing queued or running, and every page back: a sequence that a stop token ended may have a step ahead."""
        until(lambda: self.left() == (0, 0), lambda: f"sequences and frames left: {self.left()}")


@contextmanager
def live_deployment(config: DeploymentConfig) -> Iterator[LiveDeployment]:
    """Models loaded, server listening; everything is stopped at the end."""
    models = prepare_models(config)

    def prepare(model: ModelConfig) -> PreparedModel:
        return prepare_model(model, config)

    engine = start_engine(config)
    try:
        for model in models:
            engine.engine.add_model(model.served).result(timeout=30)
        with live_server(create_app(engine, catalogue(models), config.server, prepare)) as url:
            yield LiveDeployment(url, engine)
    finally:
        engine.engine.close()
