"""Result files: written, and read back for comparison."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_result(result: Mapping[str, Any], directory: Path, filename: str | None) -> Path:
    """Named after time and label, less its spaces and signs. Raises ValueError where it cannot be written."""
    label = re.sub(r"[^\w.+=-]+", "-", result["label"] or "").strip("-.")
    path = directory / (filename or f"bench-{label}{'-' if label else ''}{result['date']}.json")
    return write_text(path, json.dumps(result, indent=1, allow_nan=False) + "\n")


def make_folder(directory: Path) -> None:
    """Before a run, so that its result is not lost. Raises ValueError where nothing can be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write {directory}: {error.strerror or error}") from None
    if not os.access(directory, os.W_OK):
        raise ValueError(f"cannot write {directory}: permission denied; give another --result-dir")


def write_text(path: Path, text: str) -> Path:
    """Raises ValueError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from None
    return path


def read_result(path: Path) -> dict[str, Any]:
    """A file of `--save-result`. Raises ValueError in one line for anything else."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(result, dict) or not isinstance(result.get("models"), dict) or "client" not in result:
        raise ValueError(f"{path} is no result of `crosspool bench`; write one with --save-result")
    return result
