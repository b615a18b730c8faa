"""From a deployment's configuration and its prepared models to a running engine, with these loaded."""

from collections.abc import Sequence
from dataclasses import replace

from crosspool.cluster.apart import ApartCluster
from crosspool.cluster.base import Cluster
from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.rank_log import WARNINGS, RankLog
from crosspool.cluster.start import start_cluster
from crosspool.config import DeploymentConfig
from crosspool.deployment.engine_and_cluster import cluster_config, engine_config
from crosspool.deployment.prefill_room import with_prefill_room
from crosspool.deployment.preflight import check_gpus, check_machine, check_whole_models
from crosspool.deployment.prepared_model import PreparedModel, whole_models
from crosspool.deployment.ranks import are_apart, num_slots, prefill_ranks
from crosspool.engine.async_engine import AsyncEngine
from crosspool.engine.engine import Engine
from crosspool.errors import CrossPoolError
from crosspool.models.whole_size import whole_bytes


def start_engine(
    config: DeploymentConfig, models: Sequence[PreparedModel] = (), log: RankLog = WARNINGS
) -> AsyncEngine:
    """The two pools and the engine, running, with no models yet. The caller closes it.

    models: those that will be loaded first, by which what is not set is sized. log: of ranks' processes.
    Raises what `checked` raises.
    """
    config, cluster = checked(config, models)
    started = _start_cluster(replace(cluster, log=log), config)
    return AsyncEngine(Engine(engine_config(config), started).start())


def checked(config: DeploymentConfig, models: Sequence[PreparedModel] = ()) -> tuple[DeploymentConfig, ClusterConfig]:
    """The deployment with everything sized, and its cluster, before anything of it is started.

    Raises CrossPoolError for what no machine could serve, then for what this one cannot give.
    """
    specs = whole_models(models)
    if models and not specs and prefill_ranks(config):
        raise CrossPoolError(
            "prefill is dedicated, and no model has prompts for prefill ranks: KV is split over KV ranks, or heads are "
            "none that the kernels for prompts take; use kv_split one, or prefill inline"
        )
    config = with_prefill_room(config, specs)
    cluster = cluster_config(config)
    check_machine(config.pools)
    check_gpus(cluster)
    check_whole_models(
        config.pools,
        {model.served.name: whole_bytes(model.served.spec) for model in models if model.served.prefill_ranks},
    )
    return config, cluster


async def load_models(engine: AsyncEngine, models: Sequence[PreparedModel]) -> None:
    """Load every model, one after another, and wait until the last is ready. Raises what the first failure raises."""
    for model in models:
        await engine.add_model(model.served)


def _start_cluster(cluster: ClusterConfig, config: DeploymentConfig) -> Cluster:
    started = start_cluster(cluster)
    return ApartCluster(started, num_slots(config)) if are_apart(config) else started
