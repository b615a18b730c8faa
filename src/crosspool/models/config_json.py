"""Reading `config.json` and `generation_config.json`: typed fields, in the hub's spelling or that of transformers 5.

Hub files say `torch_dtype`, `rope_theta` + `rope_scaling` and `num_experts`; transformers 5 writes `dtype`,
`rope_parameters` and, for some families, `num_local_experts`. Every reader here takes all spellings of one field.
Nothing is ever executed: `auto_map` and `trust_remote_code` are data that nobody reads.
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal

from crosspool.errors import CheckpointError, UnsupportedModelError
from crosspool.models.spec import DType


class _Required(Enum):
    REQUIRED = "required"


REQUIRED: Final = _Required.REQUIRED
"""Default of a field that has none: its absence is an error."""

_DTYPES: dict[str, DType] = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError if it is absent, cut short or not an object."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); incomplete download?") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value


def read_text(path: Path) -> str:
    """What a JSON file holds, unread. Raises CheckpointError if it is absent or no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; a model directory holds config.json and its weights") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); incomplete download?") from error


@dataclass(frozen=True, slots=True)
class HFConfig:
    """One `config.json`. `source` names the file in messages; `asked` gathers the fields that somebody has looked for.

    Readers take a field's spellings in order of preference. An absent field gives the default; an explicit null gives
    the default too, except in `optional_integer`, where null means "none" (DeepSeek's `q_lora_rank`).
    """

    values: Mapping[str, Any]
    source: str = "config.json"
    asked: set[str] = field(default_factory=set, compare=False, repr=False)

    def get(self, *names: str) -> Any:
        """The first of `names` that is present and not null, else None."""
        self.asked.update(names)
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def integer(self, *names: str, default: int | _Required = REQUIRED, minimum: int = 1) -> int:
        value = self._value(names, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"{self.source}: {names[0]} is {value!r}, not an integer")
        if value < minimum:
            raise CheckpointError(f"{self.source}: {names[0]} is {value}; it must be at least {minimum}")
        return value

    def optional_integer(self, *names: str, default: int | None) -> int | None:
        """Like `integer`, but an explicit null stays None."""
        if not any(name in self.values for name in names):
            return default
        return None if self.get(*names) is None else self.integer(*names)

    def number(self, *names: str, default: float | _Required = REQUIRED, above: float = -math.inf) -> float:
        """A finite number: Python reads NaN and Infinity in JSON, but no field means them."""
        value = self._value(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self.source}: {names[0]} is {value!r}, not a number")
        if not above < value <= sys.float_info.max:
            least = f" above {above:g}" if above > -math.inf else ""
            raise CheckpointError(f"{self.source}: {names[0]} is {value}; it must be a finite number{least}")
        return float(value)

    def flag(self, *names: str, default: bool) -> bool:
        value = self._value(names, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.source}: {names[0]} is {value!r}, neither true nor false")
        return value

    def string(self, *names: str, default: str | _Required = REQUIRED) -> str:
        value = self._value(names, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.source}: {names[0]} is {value!r}, not a string")
        return value

    def token_ids(self, name: str, default: int | None = None) -> tuple[int, ...]:
        """A token id, a list of them, or none. An explicit null is none, whatever the default."""
        value = self.values.get(name, default)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
            raise CheckpointError(f"{self.source}: {name} is {value!r}, neither a token id nor a list of them")
        return tuple(ids)

    def per_layer(self, name: str, num_layers: int, allowed: tuple[str, ...]) -> tuple[str, ...] | None:
        """A list with one word a layer, each one of `allowed`; None where the config has no such list."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < num_layers:
            raise CheckpointError(f"{self.source}: {name} is {value!r}; it must list one entry for each layer")
        for entry in value[:num_layers]:
            self.supported(name, entry, allowed)
        return tuple(value[:num_layers])

    def supported(self, name: str, value: object, supported: tuple[Any, ...]) -> None:
        """Raise UnsupportedModelError unless `value` is one of `supported`."""
        if value not in supported:
            known = ", ".join(str(entry) for entry in supported)
            raise UnsupportedModelError(f"{self.source}: {name} is {value!r}; supported: {known}")

    def _value(self, names: tuple[str, ...], default: Any) -> Any:
        value = self.get(*names)
        if value is not None:
            return value
        if default is REQUIRED:
            raise CheckpointError(f"{self.source}: {names[0]} is missing")
        return default


def read_activation(config: HFConfig) -> Literal["silu"]:
    """The gate's activation; every family here uses SiLU. Raises UnsupportedModelError for any other."""
    config.supported("hidden_act", config.string("hidden_act", default="silu"), ("silu", "swish"))
    return "silu"


def read_dtype(config: HFConfig) -> DType:
    """The dtype of the weights; float32 where the config does not say.

    Raises UnsupportedModelError for quantised weights (FP8, MXFP4, ...) and for other dtypes.
    """
    quantisation = config.get("quantization_config")
    if quantisation is not None:
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
        raise UnsupportedModelError(
            f"{config.source}: quantization_config asks for {method!r}; supported: plain {', '.join(_DTYPES)} weights "
            "(take the unquantised checkpoint)"
        )
    name = config.string("dtype", "torch_dtype", default="float32").removeprefix("torch.")
    config.supported("dtype", name, tuple(_DTYPES))
    return _DTYPES[name]
