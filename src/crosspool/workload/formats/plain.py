"""Plain tables: CSV with a header, or JSON lines, one request a row, under the usual column names."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosspool.workload.text import open_text, seconds, whole_number
from crosspool.workload.trace import Trace, make_trace

COLUMNS: dict[str, tuple[str, ...]] = {
    "arrival_s": ("arrival_s", "arrival", "t_s", "t", "timestamp_s", "arrived_at"),
    "model": ("model", "model_id", "model_name"),
    "prompt_tokens": ("prompt_tokens", "prompt", "in", "input_tokens", "input_length", "num_prefill_tokens"),
    "output_tokens": ("output_tokens", "output", "out", "completion_tokens", "output_length", "num_decode_tokens"),
    "service_s": ("service_s", "service_time_s", "residence_s", "api_time_s"),
}


@dataclass(slots=True)
class Table:
    """Columns of a file as lists; arrival_s and service_s are empty where the file has no such column."""

    arrival_s: list[float] = field(default_factory=list)
    model: list[str] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    service_s: list[float] = field(default_factory=list)


def read_plain(path: Path, model: str | None = None) -> Trace:
    """A trace from CSV or JSON lines. `model` names the rows of a file without a model column.

    Raises ValueError naming file, line and value.
    """
    table = read_table(path, model)
    if not table.arrival_s:
        raise ValueError(
            f"{path} has no arrival column ({', '.join(COLUMNS['arrival_s'])}); use it as `lengths: {{file: ...}}`"
        )
    models = tuple(dict.fromkeys(table.model))
    lookup = {name: idx for idx, name in enumerate(models)}
    return make_trace(
        table.arrival_s,
        [lookup[name] for name in table.model],
        table.prompt_tokens,
        table.output_tokens,
        models=models,
        service_s=table.service_s or None,
    )


def read_table(path: Path, model: str | None = None) -> Table:
    """The columns of a CSV or JSON-lines file, with or without arrivals. Raises ValueError naming file and line."""
    with open_text(path) as file:
        start = file.read(1)
    rows = _json_rows(path) if start == "{" else _csv_rows(path)
    table = Table()
    default_model = model or path.name.split(".")[0]
    names: dict[str, str] | None = None
    for line, row in rows:
        if names is None:
            names = _column_names(path, row)
        where = f"{path}:{line}: "
        if "arrival_s" in names:
            table.arrival_s.append(seconds(row.get(names["arrival_s"]), where + names["arrival_s"]))
        table.model.append(str(row[names["model"]]) if row.get(names.get("model", "")) else default_model)
        for column in ("prompt_tokens", "output_tokens"):
            getattr(table, column).append(whole_number(row.get(names[column]), where + names[column]))
        if "service_s" in names:
            text = row.get(names["service_s"])
            table.service_s.append(float("nan") if text in (None, "") else seconds(text, where + names["service_s"]))
    if names is None:
        raise ValueError(f"{path} holds no request")
    return table


def _column_names(path: Path, row: dict[str, Any]) -> dict[str, str]:
    """Our name of each column to the file's."""
    found = {ours: next((name for name in theirs if name in row), "") for ours, theirs in COLUMNS.items()}
    for column in ("prompt_tokens", "output_tokens"):
        if not found[column]:
            raise ValueError(
                f"{path} has no column for {column} among {', '.join(map(str, row))[:120]}; "
                f"name it one of {', '.join(COLUMNS[column])}"
            )
    return {ours: theirs for ours, theirs in found.items() if theirs}


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with open_text(path) as file:
        reader = csv.reader(file)
        header = next(reader, [])
        for values in reader:
            if not values:
                continue
            if len(values) != len(header):
                raise ValueError(f"{path}:{reader.line_num}: {len(values)} values under {len(header)} columns")
            yield reader.line_num, dict(zip(header, values, strict=True))


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error.msg})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: a {type(row).__name__}; each line must be an object")
            yield number, row
