"""One wrong value in any field of any family's config: a spec, or a refusal in one line; never another error."""

from __future__ import annotations

import math
from typing import Any

import pytest

from crosspool.errors import CheckpointError, UnsupportedModelError
from crosspool.models.families.registry import FAMILIES, spec_from_config
from crosspool.models.rope import attention_factor, inv_freq
from tests.support.tiny_models import CONFIGS, tiny_config

GARBAGE: tuple[Any, ...] = (
    None,
    -1,
    0,
    1,
    7,
    10**30,
    2.5,
    -2.5,
    math.nan,
    math.inf,
    True,
    "x",
    [],
    [None],
    {},
    {"a": 1},
)
YARN = CONFIGS["deepseek_v2"]["rope_scaling"] | {"attention_factor": 1.0, "truncate": True, "rope_theta": 100.0}
ROPES = {"yarn": YARN | {"partial_rotary_factor": 1.0}, "llama3": CONFIGS["llama"]["rope_scaling"]}
BESIDE = [
    "head_dim",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "layer_types",
    "mlp_layer_types",
    "mlp_only_layers",
]
BESIDE += ["decoder_sparse_step", "use_sliding_window", "sliding_window", "max_window_layers", "n_group", "topk_group"]
BESIDE += ["num_hidden_layers", "hidden_size", "model_type", "text_config", "quantization_config", "dtype"]


def refusal(config: dict[str, Any]) -> str | None:
    """What is said about it; None of a spec, whose frequencies are numbers."""
    try:
        spec = spec_from_config(config)
    except (CheckpointError, UnsupportedModelError) as error:
        return str(error)
    for shape in spec.shapes:
        if shape.rope.dim < 4096:
            assert all(map(math.isfinite, inv_freq(shape.rope)))
        assert math.isfinite(attention_factor(shape.rope))
    return None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_any_wrong_value_is_refused_or_read(family):
    tried = [tiny_config(family, **{name: value}) for name in {*CONFIGS[family], *BESIDE} for value in GARBAGE]
    for rope in ROPES.values():
        tried += [tiny_config(family, rope_scaling={**rope, name: value}) for name in rope for value in GARBAGE]
    said = [words for words in map(refusal, tried) if words is not None]
    assert 0.3 * len(tried) < len(said) < 0.9 * len(tried)
    assert all(words.startswith("config.json") and "\n" not in words for words in said)
