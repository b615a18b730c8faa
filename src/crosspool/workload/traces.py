"""Any recorded trace by its path: the format is told or recognised by the file's first bytes."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path

from crosspool.workload.formats import azure, bench_result, mooncake, plain
from crosspool.workload.text import open_text
from crosspool.workload.trace import Trace

FORMATS: dict[str, Callable[[Path, str | None], Trace]] = {
    "plain": plain.read_plain,
    "azure": azure.read_azure,
    "mooncake": mooncake.read_mooncake,
    "bench": bench_result.read_bench_result,
}
"""ServeGen files are generators, not recordings: formats/servegen.py."""


def read_trace(path: Path, format_name: str = "auto", model: str | None = None) -> Trace:
    """The trace in a file, gzipped or not. `model` names its requests where the format does not.

    Raises ValueError in one line for an unknown format, an unreadable file or a wrong value.
    """
    if format_name == "auto":
        format_name = recognise(path)
    if format_name not in FORMATS:
        raise ValueError(f"trace format {format_name!r} is unknown; use auto, {', '.join(FORMATS)}")
    try:
        return FORMATS[format_name](path, model)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:  # gzip notices damage while it reads
        raise ValueError(f"cannot read {path}: {error}") from None


def recognise(path: Path) -> str:
    """The format that the first line looks like; `plain` for anything else."""
    try:
        with open_text(path) as file:
            first = file.readline(1 << 16).strip()
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    if first.startswith("TIMESTAMP,"):
        return "azure"
    if not first.startswith("{"):
        return "plain"
    try:
        row = json.loads(first)
    except json.JSONDecodeError:
        return "bench"  # one object over several lines, or a line too long to hold a request
    if "hash_ids" in row or {"timestamp", "input_length"} <= row.keys():
        return "mooncake"
    return "bench" if "input_lens" in row or "itls" in row or "ttfts" in row else "plain"
