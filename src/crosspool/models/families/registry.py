"""The model types that can be served: a dict, and the way from a config to its family and spec."""

from collections.abc import Mapping
from typing import Any

from crosspool.errors import UnsupportedModelError
from crosspool.models.config_json import HFConfig
from crosspool.models.families import (
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    llama,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from crosspool.models.families.family import Family
from crosspool.models.families.unread import refuse_unread
from crosspool.models.spec import ModelSpec

MAX_LAYERS = 1023
"""An epoch counts the layers of a step up to 1024 (`scheduler/step.py`)."""

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        qwen3_moe.FAMILY,
        glm4_moe_lite.FAMILY,
        deepseek_v2.FAMILY,
        mixtral.FAMILY,
        olmoe.FAMILY,
        qwen2_moe.FAMILY,
        deepseek_v3.FAMILY,
        glm4_moe.FAMILY,
        gpt_oss.FAMILY,
        llama.FAMILY,
        qwen3.FAMILY,
    )
}


def find_family(config: HFConfig) -> Family:
    """The family of the config's `model_type`.

    Raises UnsupportedModelError naming it and what is supported, or where the config is that of a multimodal wrapper.
    """
    if config.get("text_config"):
        raise UnsupportedModelError(
            f"{config.source}: model_type {config.get('model_type')!r} nests its language model in text_config; "
            "multimodal wrappers are not served, take a checkpoint of the language model alone"
        )
    model_type = config.string("model_type")
    config.supported("model_type", model_type, tuple(FAMILIES))
    return FAMILIES[model_type]


def spec_from_config(values: Mapping[str, Any], source: str = "config.json") -> ModelSpec:
    """The spec of one parsed `config.json`.

    Raises UnsupportedModelError for what no family implements, CheckpointError for fields that are missing, of the
    wrong type or at odds with each other.
    """
    config = HFConfig(values, source)
    family = find_family(config)
    num_layers = config.integer("num_hidden_layers", default=1)
    if num_layers > MAX_LAYERS:  # told before a list of that length is made
        raise UnsupportedModelError(f"{source}: num_hidden_layers is {num_layers}; at most {MAX_LAYERS} are supported")
    spec = family.read_spec(config)
    refuse_unread(config)
    return spec
