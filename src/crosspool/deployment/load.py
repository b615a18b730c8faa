"""The deployment that settings describe; they come from flags > environment > YAML file > plan > defaults."""

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from crosspool.config import (
    DECODE_LANES,
    PREFILL_TOKENS,
    SPLIT_PREFILL_TOKENS,
    WIDE_POOL,
    DeploymentConfig,
    ModelConfig,
    SchedulingConfig,
    ServerConfig,
)
from crosspool.deployment.model_source import is_hub_id
from crosspool.deployment.yaml_file import read_mapping
from crosspool.pools_config import PoolsConfig
from crosspool.settings import ENV_PREFIX, ModelSettings, Settings

T = TypeVar("T")


def load_deployment(
    flags: Mapping[str, Any],
    *,
    config_file: Path | None = None,
    planned: Mapping[str, Any] | None = None,
    default_models: tuple[ModelConfig, ...] = (),
) -> DeploymentConfig:
    """The deployment of `flags` (only those given), the environment, `config_file`, `planned` and the defaults.

    `planned` are settings that a plan gives. `default_models` are served where no source names a model. Raises
    ValueError with one line per wrong value.
    """
    from_file = read_yaml(config_file) if config_file is not None else {}
    below = {**_planned(planned or {}, {*from_file, *flags}), **from_file}
    for key in [key for key in below if _env_has(key)]:
        del below[key]
    told_by = {key: f"{config_file}: " for key in from_file if key in below and key not in flags}
    try:
        settings = Settings(**{**below, **flags})
    except ValidationError as error:
        raise ValueError("; ".join(_describe(item, told_by) for item in error.errors(include_url=False))) from None
    if "models" in settings.model_fields_set and not settings.models:
        raise ValueError(f"{told_by.get('models', '')}models is empty; list one, or leave it out for the demo models")
    return _deployment(settings, default_models)


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings in a YAML file. Raises ValueError naming the file, and the line where YAML is broken."""
    found: dict[str, Any] = {}
    for key, value in read_mapping(path, "such as `port: 8000`").items():
        name = str(key).replace("-", "_")
        if name in found:
            raise ValueError(f"{path} sets {name} twice, with - and with _; leave one of them out")
        found[name] = value
    return found


def _planned(planned: Mapping[str, Any], given: set[str]) -> dict[str, Any]:
    """Settings of a plan; its lanes and the limits of its models only where nothing given stands against them."""
    if "pipeline" in given or _env_has("pipeline"):
        planned = {key: value for key, value in planned.items() if key != "decode_lanes"}
    if "max_model_len" not in given and not _env_has("max_model_len"):
        return dict(planned)
    models = [
        {key: value for key, value in entry.items() if key != "max_model_len"} for entry in planned.get("models", [])
    ]
    return {**planned, "models": models} if models else dict(planned)


def _env_has(key: str) -> bool:
    return (ENV_PREFIX + key).upper() in {name.upper() for name in os.environ}


def _describe(item: Mapping[str, Any], told_by: Mapping[str, str]) -> str:
    """One wrong value, behind the file that it comes from. A check of several values names them itself."""
    if not item["loc"]:  # its input is every value, API keys among them
        return str(item["msg"]).removeprefix("Value error, ")
    where = told_by.get(str(item["loc"][0]), "") + ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{where} is not a setting; `crosspool serve --help` lists them"
    if item["type"] == "missing":
        return f"{where} is missing"
    return f"{where} is {str(item['input'])[:80]!r}: {item['msg'].removeprefix('Value error, ')}"


def _deployment(settings: Settings, default_models: tuple[ModelConfig, ...]) -> DeploymentConfig:
    return DeploymentConfig(
        models=tuple(_with_common(model, settings) for model in [*map(_model, settings.models)] or default_models),
        pools=_filled(
            PoolsConfig,
            settings,
            num_kv_ranks=settings.kv_ranks,
            num_weights_ranks=settings.weights_ranks,
            num_prefill_ranks=settings.prefill_ranks,
            num_gpus=settings.gpus,
        ),
        scheduling=_filled(
            SchedulingConfig,
            settings,
            max_num_batched_tokens=_prefill_tokens(settings),
            num_decode_lanes=_decode_lanes(settings),
            num_prefill_lanes=settings.prefill_lanes,
            queue_timeout_s=settings.queue_timeout,
            recovery_timeout_s=settings.recovery_timeout,
        ),
        server=_filled(
            ServerConfig,
            settings,
            api_keys=tuple(settings.api_key),
            admin_api_keys=tuple(settings.admin_api_key),
            quiet_paths=tuple(settings.disable_access_log_for_endpoints),
            shutdown_timeout_s=settings.shutdown_timeout,
            sse_keep_alive_s=settings.sse_keep_alive_interval,
        ),
        dtype=settings.dtype,
        download_dir=settings.download_dir,
    )


def _model(model: ModelSettings) -> ModelConfig:
    return _filled(
        ModelConfig,
        model,
        source=model.path,
        name=model.name or (model.path if is_hub_id(model.path) else None),
        kv_floor_bytes=model.kv_floor,
        kv_ceiling_bytes=model.kv_ceiling,
    )


def _filled(kind: type[T], settings: Settings | ModelSettings, **others: Any) -> T:
    """A config: `others`, and for the rest of its fields the settings of the same names. Lists become tuples."""
    for name in (each.name for each in fields(kind) if each.name not in others):  # type: ignore[arg-type]
        value = getattr(settings, name)
        others[name] = tuple(value) if isinstance(value, list) else value
    return kind(**others)


def _prefill_tokens(settings: Settings) -> int:
    if settings.max_num_batched_tokens is not None:
        return settings.max_num_batched_tokens
    is_split = settings.backend == "cuda" and settings.kv_ranks > 1 and settings.baseline is None
    return SPLIT_PREFILL_TOKENS if is_split else PREFILL_TOKENS[settings.backend]


def _decode_lanes(settings: Settings) -> int:
    if settings.pipeline == "off":
        if settings.decode_lanes not in (None, 1):
            raise ValueError(
                f"decode_lanes is {settings.decode_lanes} with pipeline off, which has one; leave one of them out"
            )
        return 1
    return DECODE_LANES + _has_wide_pool(settings) if settings.decode_lanes is None else settings.decode_lanes


def _has_wide_pool(settings: Settings) -> bool:
    """Whether two pools have WIDE_POOL weights ranks or more, each on a GPU of its own."""
    if settings.backend != "cuda" or settings.baseline is not None or settings.weights_shares:
        return False
    num_ranks = settings.kv_ranks + settings.weights_ranks
    if settings.prefill == "dedicated":
        num_ranks += settings.prefill_ranks
    return settings.weights_ranks >= WIDE_POOL and (settings.gpus or num_ranks) >= num_ranks


def _with_common(model: ModelConfig, settings: Settings) -> ModelConfig:
    """`model` with the settings of all models where it has none of its own."""
    return replace(
        model,
        max_model_len=settings.max_model_len if model.max_model_len is None else model.max_model_len,
        chat_template=settings.chat_template if model.chat_template is None else model.chat_template,
    )
