"""From a config's rotary fields, in either spelling, to a RopeSpec.

transformers 5 keeps everything in `rope_parameters`; hub files have `rope_theta` and `rope_scaling` (whose kind is
`rope_type`, or `type` in older ones), with `partial_rotary_factor` beside them.
"""

from collections.abc import Mapping
from typing import Any

from crosspool.errors import CheckpointError, UnsupportedModelError
from crosspool.models.config_json import HFConfig
from crosspool.models.spec import RopeScaling, RopeSpec

SUPPORTED_KINDS = ("default", "linear", "llama3", "yarn")


def read_rope(
    config: HFConfig,
    *,
    head_dim: int,
    max_positions: int,
    default_theta: float = 10000.0,
    default_parameters: Mapping[str, Any] | None = None,
    default_partial_factor: float | None = None,
    interleaved: bool = False,
) -> RopeSpec:
    """The rotary embedding of heads whose rotated part has `head_dim` elements.

    default_parameters stand in where the config has neither spelling. A default_partial_factor marks a family that can
    rotate a part of the head only; in others a factor below one is refused, as no implementation there obeys it.
    Raises UnsupportedModelError for kinds without a rule here, CheckpointError for fields of the wrong type.
    """
    parameters = _parameters(config, default_parameters)
    rope = HFConfig(parameters, f"{config.source}: rope")
    kind = rope.string("rope_type", "type", default="default")
    config.supported("rope type", kind, SUPPORTED_KINDS)
    theta = rope.number("rope_theta", default=config.number("rope_theta", default=default_theta), above=1.0)
    fallback = 1.0 if default_partial_factor is None else default_partial_factor
    partial = rope.number("partial_rotary_factor", default=config.number("partial_rotary_factor", default=fallback))
    if not 0.0 < partial <= 1.0:
        raise CheckpointError(f"{config.source}: partial_rotary_factor is {partial}; it must be above 0 and at most 1")
    if partial != 1.0 and default_partial_factor is None:
        raise UnsupportedModelError(
            f"{config.source}: partial_rotary_factor is {partial}; this model type rotates whole heads only (1.0)"
        )
    dim = int(head_dim * partial)
    if not dim or dim % 2:
        raise CheckpointError(
            f"{config.source}: the rotated part of a head has {dim} of its {head_dim} elements; it must be even"
        )
    scaling = None if kind == "default" else _scaling(config, rope, kind, max_positions)
    return RopeSpec(theta=theta, dim=dim, interleaved=interleaved, scaling=scaling)


def _parameters(config: HFConfig, default: Mapping[str, Any] | None) -> Mapping[str, Any]:
    found = config.get("rope_scaling") or config.get("rope_parameters")  # this order, as in transformers
    if not found:
        return default or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{config.source}: rope_parameters is {found!r}, not an object")
    nested = [name for name, value in found.items() if isinstance(value, Mapping)]
    if nested:
        raise UnsupportedModelError(
            f"{config.source}: rope_parameters differ by layer type ({', '.join(nested)}); "
            "supported: one rotary embedding for all layers"
        )
    return found


def _scaling(config: HFConfig, rope: HFConfig, kind: str, max_positions: int) -> RopeScaling:
    all_dim = _optional(rope, "mscale_all_dim")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=rope.number("factor", above=0.0), mscale_all_dim=all_dim)
    outer = config.get("original_max_position_embeddings")  # wins over the inner one, as in transformers
    original = (
        config.integer("original_max_position_embeddings")
        if outer is not None
        else rope.integer("original_max_position_embeddings", default=max_positions)
    )
    if kind == "llama3":
        low = rope.number("low_freq_factor", above=0.0)
        return RopeScaling(
            kind="llama3",
            factor=rope.number("factor", above=0.0),
            original_max_positions=original,
            mscale_all_dim=all_dim,
            low_freq_factor=low,
            high_freq_factor=rope.number("high_freq_factor", above=low),
        )
    return RopeScaling(
        kind="yarn",
        factor=rope.number("factor", default=max_positions / original, above=0.0),
        original_max_positions=original,
        beta_fast=_turns(rope, "beta_fast", 32.0),
        beta_slow=_turns(rope, "beta_slow", 1.0),
        mscale=_optional(rope, "mscale"),
        mscale_all_dim=all_dim,
        attention_factor=_optional(rope, "attention_factor"),
        truncate=rope.flag("truncate", default=True),
    )


def _turns(rope: HFConfig, name: str, default: float) -> float:
    """A number above 0; 0 means the default, as in transformers."""
    return default if rope.get(name) == 0 else rope.number(name, default=default, above=0.0)


def _optional(rope: HFConfig, name: str) -> float | None:
    return None if rope.get(name) is None else rope.number(name)
