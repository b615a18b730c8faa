"""What a profiler's trace says of decode steps: when each crossed its layers, and what the host did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HOST = "host"
SEGMENT = "segment"
"""First word of a rank loop's work in a trace."""

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that took time, in microseconds of the trace's clock. track: HOST, or the number of a GPU."""

    name: str
    track: str
    begin_us: float
    end_us: float

    @property
    def is_call(self) -> bool:
        """Of CUDA, by the host; else of the host it is a segment of a rank's loop."""
        return self.track == HOST and not self.name.startswith(SEGMENT)


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step on the KV rank's GPU. `layers`: from the first sums that are back to the last."""

    begin_us: float
    layers_begin_us: float
    layers_end_us: float
    end_us: float
    num_layers: int


def read_spans(trace: Mapping[str, Any]) -> list[Span]:
    """Of a trace in Chrome's format as torch.profiler writes it, by time: work on GPUs, CUDA calls, segments."""
    spans = []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        kind, begin = event.get("cat", ""), float(event["ts"])
        if kind in _ON_GPU:
            track = str(event["args"]["device"])
        elif kind in _CALLS or (kind == "user_annotation" and event["name"].startswith(SEGMENT)):
            track = HOST
        else:
            continue
        spans.append(Span(event["name"], track, begin, begin + float(event["dur"])))
    return sorted(spans, key=lambda span: span.begin_us)


def decode_steps(spans: Sequence[Span], kv_gpu: str) -> list[Step]:
    """From each `begin_pass` on the KV rank's GPU to its `end_pass`. Raises ValueError where one has no layers."""
    steps: list[Step] = []
    begin_us, sums = 0.0, list[Span]()
    for span in spans:
        if span.track != kv_gpu:
            continue
        if "begin_pass" in span.name:
            begin_us, sums = span.begin_us, []
        elif "wait_norm" in span.name:
            sums.append(span)
        elif "end_pass" in span.name and begin_us:
            if len(sums) < 2:
                raise ValueError(f"a step at {begin_us} us shows {len(sums)} layers; the trace is not whole")
            steps.append(Step(begin_us, sums[0].end_us, sums[-1].end_us, span.end_us, len(sums)))
            begin_us = 0.0
    return steps


def host_events_between_layers(spans: Sequence[Span], step: Step) -> list[Span]:
    """What the host began after the step's first layer and before the end of its last: CUDA calls and segments."""
    return [span for span in spans if span.track == HOST and step.layers_begin_us < span.begin_us < step.layers_end_us]
