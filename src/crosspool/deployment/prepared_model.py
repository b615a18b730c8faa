"""Models of a deployment before their weights: found, and their small files read, for engine and server."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from crosspool.backends.cuda.kernels.limits import check_shapes
from crosspool.backends.cuda.steps.passes import PASS_TOKENS, max_passes
from crosspool.config import DeploymentConfig, ModelConfig
from crosspool.deployment.model_source import DEMO_MODELS, model_directory
from crosspool.deployment.prefill_room import has_prompt_kernels
from crosspool.deployment.preflight import check_slices
from crosspool.deployment.ranks import kv_ranks_of, prefill_ranks, weights_ranks_of
from crosspool.engine.serve_directory import served_model
from crosspool.engine.served_model import ServedModel
from crosspool.errors import CheckpointError, UnsupportedModelError
from crosspool.models.directory import read_model_dir
from crosspool.models.spec import ModelSpec
from crosspool.pools_config import BACKEND_DTYPES, KVSplitChoice
from crosspool.server.catalogue import Catalogue, ModelFrontend, SamplingDefaults
from crosspool.server.chat import load_chat_template
from crosspool.server.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model whose small files are read and whose weights are not."""

    served: ServedModel
    frontend: ModelFrontend


def demo_models() -> tuple[ModelConfig, ...]:
    """The models inside the package, which `crosspool serve` serves when it is given none."""
    return tuple(ModelConfig(source=str(directory)) for directory in DEMO_MODELS.values())


def prepare_models(config: DeploymentConfig) -> list[PreparedModel]:
    """Find (or download) every model and read its small files.

    Raises CheckpointError or UnsupportedModelError, naming the model, for the first that cannot be served.
    """
    return [prepare_model(model, config) for model in config.models]


def prepare_model(model: ModelConfig, config: DeploymentConfig) -> PreparedModel:
    """The same for one model, of the deployment or beside it."""
    name = model.served_name
    try:
        directory = model_directory(model.source, revision=model.revision, download_dir=config.download_dir)
        served = _served(model, config, directory)
        return PreparedModel(served, _frontend(model, served, directory))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"model {name}: {error}") from None
    except (CheckpointError, ValueError, OSError, RecursionError) as error:  # a file that is none, or not to be read
        raise CheckpointError(f"model {name}: {error}") from None


def whole_models(models: Sequence[PreparedModel]) -> list[ModelSpec]:
    """Of those that prefill ranks hold whole."""
    return [model.served.spec for model in models if model.served.prefill_ranks]


def catalogue(models: Sequence[PreparedModel]) -> Catalogue:
    return Catalogue(model.frontend for model in models)


def _served(model: ModelConfig, config: DeploymentConfig, directory: Path) -> ServedModel:
    """Where it lies and what it may hold. Raises ValueError for what the deployment cannot do with this model."""
    pools, is_cuda = config.pools, config.pools.backend == "cuda"
    split = model.kv_split or pools.kv_split
    served = _placed(model, config, directory, split)
    _tell_limit(model, served.spec)
    if pools.baseline == "elastic" and split == "auto" and served.kv_split == "tokens":
        served = _placed(model, config, directory, "one")  # replicas: engines without pools do no other
    if is_cuda and pools.baseline is None and served.kv_split != "one":
        _check_prefill(served, config.scheduling.max_num_batched_tokens)
    if is_cuda:
        check_shapes(served.spec)
    check_slices(served.spec, len(served.weights_ranks), pools.weights_shares)
    if served.kv_split != "one" or (is_cuda and not has_prompt_kernels(served.spec)):
        served = replace(served, prefill_ranks=())  # its prompts run in the pools
    return replace(
        served,
        kv_floor_bytes=model.kv_floor_bytes,
        kv_ceiling_bytes=model.kv_ceiling_bytes,
        has_random_weights=pools.weights == "random",
        route=pools.route,
    )


def _placed(model: ModelConfig, config: DeploymentConfig, directory: Path, split: KVSplitChoice) -> ServedModel:
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


def _tell_limit(model: ModelConfig, spec: ModelSpec) -> None:
    own_limit = spec.max_position_embeddings
    if model.max_model_len is not None and model.max_model_len > own_limit:
        logger.warning(
            "max_model_len is %d for %s, whose own limit is %d tokens; its own holds",
            model.max_model_len,
            model.served_name,
            own_limit,
        )


def _check_prefill(served: ServedModel, num_tokens: int) -> None:
    """Raises ValueError where a prefill step of so many tokens has more passes than a step has epochs."""
    most = max_passes(served.spec.num_layers) * PASS_TOKENS
    if num_tokens > most:
        raise ValueError(
            f"max_num_batched_tokens is {num_tokens}; over several KV ranks on GPUs a step takes up to {most} of a "
            f"model of {served.spec.num_layers} layers, so set that or less"
        )


def _frontend(model: ModelConfig, served: ServedModel, directory: Path) -> ModelFrontend:
    tokenizer = TextTokenizer.from_directory(directory, served.tokenizer)
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
