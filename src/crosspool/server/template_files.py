"""Where a model directory keeps its chat templates, and what they are called.

A file of its own (`chat_template.jinja`, with others in `additional_chat_templates`), else `chat_template` in
tokenizer_config.json, else that of `chat_template.json`, as older exports have it. The field is a template, several by
name, or a list of objects with a name and a template each.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosspool.errors import CheckpointError, unreadable_because


def named_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name, `default` what is used; empty where there are none. config: of the tokenizer.

    Raises CheckpointError for files that cannot be read and for fields that hold no templates.
    """
    if (directory / "chat_template.jinja").exists():
        others = sorted((directory / "additional_chat_templates").glob("*.jinja"))
        return {path.stem: read_template(path) for path in others} | {
            "default": read_template(directory / "chat_template.jinja")
        }
    if config.get("chat_template") is not None:
        return _named(config["chat_template"], directory / "tokenizer_config.json")
    path = directory / "chat_template.json"
    if not path.exists():
        return {}
    try:
        loaded = json.loads(read_template(path))
    except ValueError as error:
        raise CheckpointError(f"cannot read the chat template {path}: {error}") from None
    return _named(loaded.get("chat_template") if isinstance(loaded, dict) else loaded, path)


def read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read the chat template {path}: {unreadable_because(error)}") from None


def _named(value: Any, path: Path) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value = {item.get("name"): item.get("template") for item in value}
    if not isinstance(value, dict) or not all(isinstance(part, str) for item in value.items() for part in item):
        raise CheckpointError(f"{path}: chat_template is neither a template nor several with a name each")
    return value
