"""`crosspool serve --check`: what a deployment would serve, told without starting or listening."""

from pathlib import Path

from rich.console import Console

from crosspool.commands.loading import teller
from crosspool.config import DeploymentConfig
from crosspool.deployment.engine_and_cluster import engine_config
from crosspool.deployment.launch import checked
from crosspool.deployment.prepared_model import PreparedModel, prepare_models
from crosspool.engine.engine_core import EngineCore
from crosspool.engine.served_model import ServedModel
from crosspool.errors import CheckpointError, CrossPoolError
from crosspool.models.tensors import model_tensors
from crosspool.server.run import check_tls
from crosspool.units import format_bytes
from crosspool.weights_pool.checkpoint import Checkpoint
from crosspool.weights_pool.inventory import take_inventory


def run(config: DeploymentConfig, console: Console) -> None:
    """Tell what would be served. Raises CrossPoolError, in one line, for what would keep the server from starting.

    Weights are looked at by their files' headers. Not looked at: that the port is free, since a server may be running,
    and the memory of GPUs, which is seen when ranks start.
    """
    tell = teller(console, config.server.log_format)
    check_tls(config.server)
    models = prepare_models(config)
    config, _ = checked(config, models)
    core = EngineCore(engine_config(config))
    for model in models:
        _check_weights(model)
        try:
            core.add_model(model.served)
        except (CrossPoolError, ValueError) as error:
            raise CrossPoolError(f"model {model.served.name}: {error}") from None
    for model in models:
        tell(_line(model.served, core.context_limit(model.served)))
    tell("settings, model files and the KV pool are in order; nothing was started")


def _check_weights(model: PreparedModel) -> None:
    served = model.served
    if served.has_random_weights:
        return
    try:
        with Checkpoint(Path(served.directory)) as checkpoint:
            take_inventory(checkpoint, served.spec)
    except CheckpointError as error:
        raise CheckpointError(f"model {served.name}: {error}") from None


def _line(served: ServedModel, context_limit: int) -> str:
    kv = served.spec.kv_bytes_per_token(served.kv_dtype)
    parameters = sum(tensor.num_elements for tensor in model_tensors(served.spec))
    where = f"KV on {', '.join(served.kv_ranks)}, FFNs on {', '.join(served.weights_ranks)}"
    return (
        f"{served.name}: {parameters / 1e6:,.1f} million parameters, context {context_limit} tokens, "
        f"{format_bytes(kv)} of KV a token; {where}"
    )
