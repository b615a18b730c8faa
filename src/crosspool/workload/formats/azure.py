"""Azure LLM inference traces: CSV of TIMESTAMP, ContextTokens, GeneratedTokens; one service a file."""

import csv
from datetime import datetime
from pathlib import Path

from crosspool.workload.text import open_text, whole_number
from crosspool.workload.trace import Trace, make_trace

HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure(path: Path, model: str | None = None) -> Trace:
    """The trace of one service, named `model` or after the file. Times count from the first request.

    Raises ValueError naming file, line and value.
    """
    times, prompts, outputs = [], [], []
    with open_text(path) as file:
        reader = csv.DictReader(file)
        if missing := [name for name in HEADER if name not in (reader.fieldnames or ())]:
            raise ValueError(f"{path} has no column {missing[0]}; an Azure trace has {', '.join(HEADER)}")
        for row in reader:
            where = f"{path}:{reader.line_num}: "
            times.append(_timestamp(row["TIMESTAMP"], where))
            prompts.append(whole_number(row["ContextTokens"], where + "ContextTokens"))
            outputs.append(whole_number(row["GeneratedTokens"], where + "GeneratedTokens"))
    if not times:
        raise ValueError(f"{path} holds no request")
    first = min(times)
    name = model or path.name.split(".")[0]
    return make_trace([time - first for time in times], [0] * len(times), prompts, outputs, models=(name,))


def _timestamp(text: str | None, where: str) -> float:
    """Seconds of `2023-11-16 18:17:03.9799600`: seven decimals, one more than datetime reads; a zone may follow."""
    try:
        day, _, rest = (text or "").partition(".")
        digits = rest[: next((i for i, char in enumerate(rest) if not char.isdigit()), len(rest))]
        zone = rest[len(digits) :]
        stamp = datetime.fromisoformat(f"{day}.{digits[:6].ljust(6, '0')}{zone}" if digits else (text or ""))
    except ValueError:
        raise ValueError(
            f"{where}TIMESTAMP is {str(text)[:40]!r}; it must be like 2023-11-16 18:17:03.979960"
        ) from None
    # A fixed origin, not timestamp(): that would apply the local time zone, and its summer time, to naive values.
    return (stamp - datetime(2000, 1, 1, tzinfo=stamp.tzinfo)).total_seconds()
