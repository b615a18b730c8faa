"""One kept result of several runs of a benchmark, whose models or layouts were measured in turns.

    python -m benchmarks.merged_result OUT_DIRECTORY FIRST.json LATER.json...

What two runs have, the later one gives; each part's commit and command stay in the configuration.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Report


def merged(results: Sequence[Mapping[str, Any]], summary: str = "") -> Report:
    """summary: in place of the last one's. Raises ValueError for results of different benchmarks, machines or days."""
    last = results[-1]
    for name in ("what", "date"):
        if any(result[name] != last[name] for result in results):
            raise ValueError(f"{name} is {[result[name] for result in results]}; only parts of one result are merged")
    machines = [result["hardware"]["name"] for result in results]
    if len(set(machines)) > 1:
        raise ValueError(f"hardware is {machines}; only parts of one result are merged")
    report = Report(
        last["what"],
        hardware=machines[0],
        seed=last["seed"],
        summary=summary or last["summary"],
        date=datetime.date.fromisoformat(last["date"]),
        config={"parts": [{key: result[key] for key in ("commit", "command")} for result in results]},
        origin={key: last[key] for key in ("hardware", "commit", "command", "versions")},
    )
    for result in results:
        report.metrics.update(result["metrics"])
        report.limits.update(result["limits"])
        report.notes.update(result["notes"])
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory of the merged result")
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json", help="earlier ones first")
    options = parser.parse_args()
    for path in merged([json.loads(path.read_text(encoding="utf-8")) for path in options.results]).write(options.out):
        print(path)


if __name__ == "__main__":
    main()
