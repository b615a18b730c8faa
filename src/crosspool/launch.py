"""From a deployment's configuration to a running engine and the front ends of its models.

This is the one place that knows engine, cluster and server front ends at once.
"""

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from crosspool.backends.cuda.steps.passes import PASS_TOKENS, max_passes
from crosspool.cluster.apart import ApartCluster, own_rank
from crosspool.cluster.base import Cluster
from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.rank_log import WARNINGS, RankLog
from crosspool.cluster.start import start_cluster
from crosspool.config import DeploymentConfig, ModelConfig
from crosspool.engine.async_engine import AsyncEngine
from crosspool.engine.config import EngineConfig
from crosspool.engine.engine import Engine
from crosspool.engine.serve_directory import served_model
from crosspool.engine.served_model import ServedModel
from crosspool.errors import CheckpointError, CrossPoolError, UnsupportedModelError
from crosspool.model_source import model_directory
from crosspool.models.directory import read_model_dir
from crosspool.models.spec import DType, ModelSpec
from crosspool.models.whole_size import whole_bytes
from crosspool.pools_config import Backend, KVSplit
from crosspool.prefill_room import has_prompt_kernels, with_prefill_room
from crosspool.preflight import check_gpus, check_machine, check_slices, check_whole_models, host_bytes_for_models
from crosspool.ranks import (
    are_apart,
    arenas,
    devices,
    hosts,
    kv_bytes_of_each,
    kv_ranks,
    kv_ranks_of,
    num_lanes,
    num_slots,
    order,
    prefill_ranks,
    weights_ranks,
    weights_ranks_of,
)
from crosspool.server.catalogue import Catalogue, ModelFrontend, SamplingDefaults
from crosspool.server.chat import load_chat_template
from crosspool.server.tokenizer import TextTokenizer

DEMO_MODELS = Path(__file__).parent / "demo_models"


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model whose small files are read and whose weights are not."""

    served: ServedModel
    frontend: ModelFrontend


BACKEND_NAMES = {"numpy": "NumPy", "cuda": "CUDA"}
BACKEND_DTYPES: dict[Backend, DType] = {"numpy": "float32", "cuda": "bfloat16"}
"""What each backend computes in and its cache holds."""

CUDA_SPIN_US = 200_000.0
"""A GPU tells of a step's end in memory, so a rank with a step under way looks at it instead of sleeping."""

CUDA_START_TIMEOUT_S = 180.0
"""The first start on a machine compiles the kernels."""


def demo_models() -> tuple[ModelConfig, ...]:
    """The models inside the package, which `crosspool serve` serves when it is given none."""
    directories = sorted(path.parent for path in DEMO_MODELS.glob("*/config.json"))
    return tuple(ModelConfig(source=str(directory)) for directory in directories)


def prepare_models(config: DeploymentConfig) -> list[PreparedModel]:
    """Find (or download) every model and read its small files.

    Raises CheckpointError or UnsupportedModelError, naming the model, for the first that cannot be served.
    """
    return [prepare_model(model, config) for model in config.models]


def engine_config(config: DeploymentConfig) -> EngineConfig:
    scheduling = config.scheduling
    num_decode_lanes, num_prefill_lanes = num_lanes(config)
    return EngineConfig(
        kv_budget_bytes=kv_bytes_of_each(config),
        kv_backing=config.pools.kv_backing,
        host_budget_bytes=config.pools.host_pool_bytes,
        frame_bytes=config.pools.frame_bytes,
        kv_ranks=kv_ranks(config),
        prefill_ranks=prefill_ranks(config),
        prefill_pool_bytes=config.pools.prefill_pool_bytes or 0,
        prefill_host_bytes=host_bytes_for_models(config.pools),
        num_decode_lanes=num_decode_lanes,
        num_prefill_lanes=num_prefill_lanes,
        decode_steps=scheduling.decode_steps,
        max_num_seqs=scheduling.max_num_seqs,
        max_num_batched_tokens=scheduling.max_num_batched_tokens,
        rerun_tokens=min(PASS_TOKENS, scheduling.max_num_batched_tokens) if config.pools.backend == "cuda" else 0,
        batch_invariant=scheduling.batch_invariant,
        max_queue=scheduling.max_queue,
        max_queue_per_key=scheduling.max_queue_per_key,
        admission=scheduling.admission,
        default_deadline_s=scheduling.queue_timeout_s,
        recovery_timeout_s=scheduling.recovery_timeout_s,
        prefix_caching=scheduling.enable_prefix_caching,
        seed=scheduling.seed,
    )


def cluster_config(config: DeploymentConfig) -> ClusterConfig:
    """Raises CrossPoolError for a dtype that the backend does not compute in, or KV ranks that it cannot join."""
    backend, dtype = config.pools.backend, BACKEND_DTYPES[config.pools.backend]
    if config.dtype not in ("auto", dtype):
        name = BACKEND_NAMES[backend]
        raise CrossPoolError(f"dtype is {config.dtype}; the {name} backend computes in {dtype}, so use auto or {dtype}")
    engine = engine_config(config)
    if backend == "cuda" and config.pools.driven_by == "host" and config.pools.num_kv_ranks > 1:
        raise CrossPoolError(
            f"control is host with kv_ranks {config.pools.num_kv_ranks}, whose exchange is a part of graphs; use graphs"
        )
    if backend == "cuda" and config.pools.driven_by == "host" and engine.decode_steps > 1:
        raise CrossPoolError(
            f"decode_steps is {engine.decode_steps} with control host, which drives every step; leave one of them out"
        )
    cluster = ClusterConfig(
        backend=backend,
        layout=config.pools.layout,
        kv_ranks=kv_ranks(config),
        kv_backing=config.pools.kv_backing,
        weights_ranks=weights_ranks(config),
        prefill_ranks=prefill_ranks(config),
        prefill_lanes=tuple(engine.prefill_rank_of.items()),
        prefill_pool_bytes=config.pools.prefill_pool_bytes or 0,
        hosts=() if are_apart(config) else hosts(config),
        order=order(config),
        num_frames=engine.num_frames,
        num_host_frames=engine.num_host_frames,
        frame_bytes=engine.frame_bytes,
        max_tokens_per_step=max(engine.max_num_batched_tokens, engine.max_num_seqs),
        num_lanes=engine.num_lanes,
    )
    if backend == "numpy" and cluster.layout == "inprocess":
        return replace(cluster, hosts=(cluster.ranks,))  # in threads they would take the interpreter from each other
    if backend == "cuda":
        cluster = replace(
            cluster,
            control=config.pools.driven_by,
            steps_ahead=config.pools.steps_ahead,
            transport=config.pools.transport,
            token=secrets.token_hex(16),
            run_lanes=engine.num_decode_lanes if engine.decode_steps > 1 else 0,
            prefill_share=config.scheduling.prefill_share,
            spin_us=CUDA_SPIN_US,
            start_timeout_s=CUDA_START_TIMEOUT_S,
        )
        return _shared_gpus(cluster, config) if config.pools.baseline is None else _whole_on_gpus(cluster, config)
    return cluster


def _shared_gpus(cluster: ClusterConfig, config: DeploymentConfig) -> ClusterConfig:
    """Two pools: ranks that share a GPU share a process, since two processes of a GPU only take turns on it."""
    crowded = [group for group in hosts(config) if len(group) > 1 and set(group) & set(weights_ranks(config))]
    if crowded and config.pools.driven_by == "resident":
        raise CrossPoolError(
            f"control is resident with {' and '.join(crowded[0])} on one GPU; a resident FFN server needs one of its "
            "own, so use graphs, or a GPU for each rank"
        )
    return replace(cluster, devices=devices(config))


def _whole_on_gpus(cluster: ClusterConfig, config: DeploymentConfig) -> ClusterConfig:
    """A baseline's models lie whole on one GPU each, where both halves run on one stream."""
    if config.pools.driven_by != "graphs":
        raise CrossPoolError(
            f"control is {config.pools.driven_by} with baseline {config.pools.baseline}; "
            "its models are undivided and have no crossings to drive or to serve, so use graphs"
        )
    if config.pools.layout != "processes":
        raise CrossPoolError(
            f"layout is {config.pools.layout} with baseline {config.pools.baseline} on GPUs; use processes"
        )
    if not are_apart(config):
        return replace(cluster, joins_halves=True, devices=devices(config))
    slots = num_slots(config)
    return replace(
        cluster,
        joins_halves=True,
        kv_ranks=_each_apart(cluster.kv_ranks, slots),
        weights_ranks=_each_apart(cluster.weights_ranks, slots),
        hosts=hosts(config),
        devices=devices(config),
        arenas=arenas(config),
    )


def _each_apart(ranks: Sequence[str], slots: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(own_rank(rank, slot) for rank in ranks for slot in range(slots[rank]))


def _start_cluster(cluster: ClusterConfig, config: DeploymentConfig) -> Cluster:
    started = start_cluster(cluster)
    return ApartCluster(started, num_slots(config)) if are_apart(config) else started


def start_engine(
    config: DeploymentConfig, models: Sequence[PreparedModel] = (), log: RankLog = WARNINGS
) -> AsyncEngine:
    """The two pools and the engine, running, with no models yet. The caller closes it.

    models: those that will be loaded first, by which what is not set is sized. log: of ranks' processes.
    Raises CrossPoolError for what no machine could serve, then for what this one cannot give.
    """
    specs = whole_models(models)
    if models and not specs and prefill_ranks(config):
        raise CrossPoolError(
            "prefill is dedicated, and no model has prompts for prefill ranks: KV is split over KV ranks, or heads are "
            "none that the kernels for prompts take; use kv_split one, or prefill inline"
        )
    config = with_prefill_room(config, specs)
    cluster = replace(cluster_config(config), log=log)
    check_machine(config.pools)
    check_gpus(cluster)
    check_whole_models(
        config.pools,
        {model.served.name: whole_bytes(model.served.spec) for model in models if model.served.prefill_ranks},
    )
    return AsyncEngine(Engine(engine_config(config), _start_cluster(cluster, config)).start())


def whole_models(models: Sequence[PreparedModel]) -> list[ModelSpec]:
    """Of those that prefill ranks hold whole."""
    return [model.served.spec for model in models if model.served.prefill_ranks]


async def load_models(
    engine: AsyncEngine, models: Sequence[PreparedModel], on_loaded: Callable[[str], None] = lambda name: None
) -> None:
    """Load every model, one after another, and wait until the last is ready. Raises what the first failure raises."""
    for model in models:
        await engine.add_model(model.served)
        on_loaded(model.served.name)


def _check_prefill(served: ServedModel, num_tokens: int) -> None:
    """Raises ValueError where a prefill step of so many tokens has more passes than a step has epochs."""
    most = max_passes(served.spec.num_layers) * PASS_TOKENS
    if num_tokens > most:
        raise ValueError(
            f"max_num_batched_tokens is {num_tokens}; over several KV ranks on GPUs a step takes up to {most} of a "
            f"model of {served.spec.num_layers} layers, so set that or less"
        )


def prepare_model(model: ModelConfig, config: DeploymentConfig) -> PreparedModel:
    """The same for one model, of the deployment or beside it."""
    name = model.served_name
    split = model.kv_split or config.pools.kv_split
    try:
        directory = model_directory(model.source, revision=model.revision, download_dir=config.download_dir)
        served = _served_model(model, config, directory, split)
        own_limit = served.spec.max_position_embeddings
        if model.max_model_len is not None and model.max_model_len > own_limit:
            logger.warning(
                "max_model_len is %d for %s, whose own limit is %d tokens; its own holds",
                model.max_model_len,
                name,
                own_limit,
            )
        if config.pools.baseline == "elastic" and split == "auto" and served.kv_split == "tokens":
            served = _served_model(model, config, directory, "one")  # replicas: engines without pools do no other
        if config.pools.backend == "cuda" and config.pools.baseline is None and served.kv_split != "one":
            _check_prefill(served, config.scheduling.max_num_batched_tokens)
        check_slices(served.spec, len(served.weights_ranks), config.pools.weights_shares)
        if served.kv_split != "one" or (config.pools.backend == "cuda" and not has_prompt_kernels(served.spec)):
            served = replace(served, prefill_ranks=())  # its prompts run in the pools
        served = replace(
            served,
            kv_floor_bytes=model.kv_floor_bytes,
            kv_ceiling_bytes=model.kv_ceiling_bytes,
            has_random_weights=config.pools.weights == "random",
            route=config.pools.route,
        )
        return PreparedModel(served, _frontend(model, served, directory))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"model {name}: {error}") from None
    except (CheckpointError, ValueError) as error:
        raise CheckpointError(f"model {name}: {error}") from None


def _served_model(model: ModelConfig, config: DeploymentConfig, directory: Path, split: KVSplit) -> ServedModel:
    return served_model(
        directory,
        kv_ranks=kv_ranks_of(model, config),
        kv_split=split,
        weights_ranks=weights_ranks_of(model, config),
        weights_shares=config.pools.weights_shares,
        prefill_ranks=prefill_ranks(config),
        frame_bytes=config.pools.frame_bytes,
        kv_dtype=BACKEND_DTYPES[config.pools.backend],
        name=model.served_name,
        page_tokens=model.page_tokens,
        max_context=model.max_model_len,
    )


def _frontend(model: ModelConfig, served: ServedModel, directory: Path) -> ModelFrontend:
    tokenizer = TextTokenizer.from_directory(directory)
    override = Path(model.chat_template) if model.chat_template is not None else None
    return ModelFrontend(
        name=served.name,
        vocab_size=served.spec.vocab_size,
        tokenizer=tokenizer,
        template=load_chat_template(directory, tokenizer, override),
        defaults=SamplingDefaults.of(read_model_dir(directory).generation),
        aliases=model.aliases,
        source=model.source,
        eos_token_ids=served.spec.eos_token_ids,
    )


def catalogue(models: Sequence[PreparedModel]) -> Catalogue:
    return Catalogue(model.frontend for model in models)
