"""What counts as a host event between the layers of a step, on traces made by hand."""

from __future__ import annotations

import pytest

from benchmarks.traces.step_picture import step_picture
from benchmarks.traces.step_trace import HOST, decode_steps, host_events_between_layers, read_spans


def event(kind, name, begin, duration, device=None):
    arguments = {} if device is None else {"device": device}
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": duration, "args": arguments}


def a_step(begin, num_layers=3):
    """Kernels of one step on GPU 0, a layer each 10 us, and of the FFN on GPU 1."""
    events = [event("kernel", "begin_pass", begin, 1, 0)]
    for layer in range(num_layers):
        at = begin + 10 * layer
        events.append(event("kernel", "norm_put", at + 2, 1, 0))
        events.append(event("kernel", "moe_up", at + 4, 3, 1))
        events.append(event("kernel", "wait_norm", at + 3, 6, 0))
    events.append(event("kernel", "end_pass", begin + 10 * num_layers + 1, 1, 0))
    return events


def trace(*events):
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}


def test_steps_are_told_apart_by_their_first_and_last_kernels():
    spans = read_spans(trace(*a_step(200), *a_step(100)))
    first, second = decode_steps(spans, "0")
    assert (first.begin_us, first.layers_begin_us, first.layers_end_us, first.end_us) == (100, 109, 129, 132)
    assert first.num_layers == 3
    assert second.begin_us == 200
    assert decode_steps(spans, "1") == []


def test_what_the_host_begins_between_layers_is_counted_and_nothing_else():
    around = [
        event("cuda_runtime", "cudaGraphLaunch", 95, 20),  # goes on into the step
        event("user_annotation", "segment of kv0", 130, 5),  # the token is read
        event("cpu_op", "aten::add", 115, 1),
        event("user_annotation", "something else", 115, 1),
    ]
    between = [
        event("cuda_runtime", "cudaMemcpyAsync", 112, 1),
        event("cuda_driver", "cuLaunchKernel", 120, 1),
        event("user_annotation", "segment of w0", 125, 1),
    ]
    spans = read_spans(trace(*a_step(100), *around))
    (step,) = decode_steps(spans, "0")
    assert host_events_between_layers(spans, step) == []
    spans = read_spans(trace(*a_step(100), *around, *between))
    found = host_events_between_layers(spans, step)
    assert [span.name for span in found] == ["cudaMemcpyAsync", "cuLaunchKernel", "segment of w0"]
    assert [span.is_call for span in found] == [True, True, False]


def test_a_trace_that_lacks_layers_is_not_taken_for_a_quiet_one():
    events = [one for one in a_step(100) if one["name"] != "wait_norm"]
    with pytest.raises(ValueError, match="the trace is not whole"):
        decode_steps(read_spans(trace(*events)), "0")


def test_the_picture_has_every_span_in_its_row():
    spans = read_spans(trace(*a_step(100), event("cuda_runtime", "cudaGraphLaunch", 99, 5)))
    (step,) = decode_steps(spans, "0")
    picture = step_picture("a step <1>", spans, step, [(HOST, "host"), ("0", "KV GPU"), ("1", "weights GPU")])
    assert picture.startswith("<svg")
    assert "a step &lt;1&gt;" in picture
    assert picture.count("<title>moe_up") == 2 * 3  # of both panels
    assert picture.count("<title>cudaGraphLaunch") == 2
