"""ModelDirectory: one Hugging Face model directory, read as data."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crosspool.errors import CheckpointError
from crosspool.models.config_json import HFConfig, read_json, read_text
from crosspool.models.families.registry import spec_from_config
from crosspool.models.spec import ModelSpec

logger = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "chat_template.jinja",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """Sampling values the model's authors recommend (`generation_config.json`); None where they say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelDirectory:
    """A model directory: `spec` (end tokens of all three sources united), defaults, and what lies beside the weights.

    served_name: what clients call the model unless told otherwise: the directory's name, or `owner/name` of a snapshot
    in a hub cache. tokenizer_files: the names of those in TOKENIZER_FILES that are present.
    """

    path: Path
    spec: ModelSpec
    generation: GenerationDefaults
    served_name: str
    tokenizer_files: tuple[str, ...]


def read_model_dir(path: Path | str) -> ModelDirectory:
    """Read a directory's JSON files; no weights are touched and no code of it is run.

    Raises UnsupportedModelError for a model no family implements, CheckpointError for missing or broken files.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory; a model is a directory with config.json and its weights")
    values = read_json(path / "config.json")
    if "auto_map" in values:
        logger.info("%s: config.json names remote code (auto_map); it is ignored, no remote code is ever run", path)
    spec = spec_from_config(values, str(path / "config.json"))
    generation = HFConfig({}, "generation_config.json")
    if (path / "generation_config.json").exists():
        generation = HFConfig(read_json(path / "generation_config.json"), str(path / "generation_config.json"))
    eos = dict.fromkeys((*spec.eos_token_ids, *generation.token_ids("eos_token_id"), *_tokenizer_eos(path)))
    if beyond := [token_id for token_id in eos if not 0 <= token_id < spec.vocab_size]:
        logger.warning("%s: the end tokens %s lie outside the vocabulary of %d; ignored", path, beyond, spec.vocab_size)
    return ModelDirectory(
        path=path,
        spec=replace(spec, eos_token_ids=tuple(token_id for token_id in eos if token_id not in beyond)),
        generation=_generation_defaults(generation),
        served_name=_served_name(path),
        tokenizer_files=tuple(name for name in TOKENIZER_FILES if (path / name).exists()),
    )


def _generation_defaults(config: HFConfig) -> GenerationDefaults:
    return GenerationDefaults(
        temperature=_within(config, "temperature", 0, 2),
        top_p=_within(config, "top_p", 0, 1, is_above=True),
        top_k=None if config.get("top_k") is None else max(0, config.integer("top_k", minimum=-1)),  # -1: all, as 0
        min_p=_within(config, "min_p", 0, 1),
        repetition_penalty=_within(config, "repetition_penalty", 0, 10, is_above=True),
        max_new_tokens=None if config.get("max_new_tokens") is None else config.integer("max_new_tokens"),
    )


def _within(config: HFConfig, name: str, least: float, most: float, *, is_above: bool = False) -> float | None:
    """A number in the bounds that hold for requests' own; is_above: the least one is outside. None where absent."""
    if config.get(name) is None:
        return None
    value = config.number(name)
    if not least <= value <= most or (is_above and value == least):
        bound = "above" if is_above else "at least"
        raise CheckpointError(
            f"{config.source}: {name} is {value:g}; it must be {bound} {least:g} and at most {most:g}"
        )
    return value


def _served_name(path: Path) -> str:
    resolved = path.resolve()
    repository = resolved.parent.parent.name  # <cache>/models--owner--name/snapshots/<revision>
    if resolved.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return resolved.name


def _tokenizer_eos(path: Path) -> tuple[int, ...]:
    """The id of the tokenizer's own end token, if it names one that its vocabulary has."""
    token = None
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if token is None and (path / name).exists():
            token = _token_text(read_json(path / name).get("eos_token"))
    if token is None:
        return ()
    try:
        token_id = _token_id(path, token)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: its tokenizer's files list tokens in an unknown form ({error!r})") from error
    if token_id is None:
        logger.warning("%s: the tokenizer's end token %r is not in its vocabulary; it is ignored", path, token)
        return ()
    return (token_id,)


def _token_text(value: Any) -> str | None:
    """A special token is a string, or an object with its text in `content`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) and text else None


def _added_tokens(path: Path) -> Sequence[Any]:
    """Those of a tokenizer.json, which stand before its vocabulary: that takes a fifth of a second, in which no other
    thread of the process runs."""
    text = read_text(path)
    begin = re.search(r'"added_tokens"\s*:\s*(?=\[)', text)
    return () if begin is None else json.JSONDecoder().raw_decode(text, begin.end())[0]


def _token_id(path: Path, token: str) -> int | None:
    if (path / "tokenizer.json").exists():
        for entry in _added_tokens(path / "tokenizer.json"):
            if _token_text(entry) == token:
                return int(entry["id"])
        vocabulary = (read_json(path / "tokenizer.json").get("model") or {}).get("vocab")
        if isinstance(vocabulary, Mapping) and token in vocabulary:
            return int(vocabulary[token])
    if (path / "tokenizer_config.json").exists():
        decoder = read_json(path / "tokenizer_config.json").get("added_tokens_decoder") or {}
        for token_id, entry in decoder.items():
            if _token_text(entry) == token:
                return int(token_id)
    return None
