"""Chrome trace export: what every station ran when, for chrome://tracing and Perfetto."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crosspool.simulator.pipeline import Span


def chrome_events(spans: Sequence[Span], stations: Sequence[str]) -> list[dict[str, Any]]:
    """Complete events ("X") in microseconds; one process a station, one thread a lane, named."""
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": index, "tid": 0, "args": {"name": name}}
        for index, name in enumerate(stations)
    ]
    pairs = sorted({(span.station, span.lane) for span in spans})
    events += [
        {"name": "thread_name", "ph": "M", "pid": station, "tid": lane, "args": {"name": f"lane {lane}"}}
        for station, lane in pairs
    ]
    events += [
        {
            "name": f"lane {span.lane}",
            "ph": "X",
            "pid": span.station,
            "tid": span.lane,
            "ts": round(span.start_s * 1e6, 3),
            "dur": round(span.duration_s * 1e6, 3),
        }
        for span in spans
    ]
    return events


def write_chrome_trace(path: Path, spans: Sequence[Span], stations: Sequence[str]) -> None:
    """Raises ValueError, in one line, where the file cannot be written."""
    try:
        with path.open("w", encoding="utf-8") as file:
            json.dump({"traceEvents": chrome_events(spans, stations), "displayTimeUnit": "ms"}, file)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from None
