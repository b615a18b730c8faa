"""Mooncake traces: JSON lines of timestamp (ms), input_length, output_length and hash_ids of 512-token blocks."""

import json
from pathlib import Path

from crosspool.workload.text import open_text, seconds, whole_number
from crosspool.workload.trace import Trace, make_trace


def read_mooncake(path: Path, model: str | None = None) -> Trace:
    """The trace of one service, named `model` or after the file. hash_ids are not read: KV is counted in full.

    Raises ValueError naming file, line and value.
    """
    times, prompts, outputs = [], [], []
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}: "
            try:
                row = json.loads(line)
                time, prompt, output = row["timestamp"], row["input_length"], row["output_length"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{where}not a Mooncake request with timestamp, input_length and output_length ({error})"
                ) from None
            times.append(seconds(time, where + "timestamp") / 1000.0)
            prompts.append(whole_number(prompt, where + "input_length"))
            outputs.append(whole_number(output, where + "output_length"))
    if not times:
        raise ValueError(f"{path} holds no request")
    name = model or path.name.split(".")[0]
    return make_trace(times, [0] * len(times), prompts, outputs, models=(name,))
