"""A cluster in one thread, lanes driven through it, and what they must give: every interleaving follows from a seed."""

from __future__ import annotations

import itertools

from crosspool.cluster.base import ModelReady
from crosspool.cluster.config import ClusterConfig
from tests.support.fake_backend import expected_tokens
from tests.support.lane_driver import LaneDriver, Run, Sequence_

BACKEND = "tests.support.fake_backend"


def make_config(num_weights_ranks, **changes):
    fields = dict(
        layout="inprocess",
        weights_ranks=tuple(f"w{idx}" for idx in range(num_weights_ranks)),
        backend=BACKEND,
        num_frames=2,
        frame_bytes=4096,
        max_tokens_per_step=64,
        step_deadline_s=5.0,
    )
    return ClusterConfig(**(fields | changes))


def until(stepped, kind, most=20_000):
    """Events up to the first one of `kind`."""
    events = []
    for _ in range(most):
        events += stepped.cluster.poll(0)
        if any(isinstance(event, kind) for event in events):
            return events
        stepped.turn()
    raise AssertionError(f"no {kind} among {events}")


def add(stepped, name, model, directory, ranks, kv_rank="kv0"):
    stepped.cluster.add_model(model.placement(name, directory / name, ranks, kv_rank))
    return until(stepped, ModelReady)


def run_lanes(stepped, lanes, between=lambda run: None, most=40_000):
    run = Run(stepped.cluster, lanes)
    for _ in range(most):
        between(run)
        run.turn(timeout_s=0)
        if all(lane.is_done for lane in lanes):
            return run
        stepped.turn()
    raise AssertionError(f"lanes do not end: {lanes}; last events {run.events[-5:]}")


def check_tokens(lanes, models, num_weights_ranks):
    for lane in lanes:
        for sequence in lane.sequences:
            model = models[lane.model]
            expected = expected_tokens(model, sequence.prompt, sequence.num_tokens, num_weights_ranks)
            assert sequence.outputs == expected, f"lane {lane.lane}, prompt {sequence.prompt}"


def make_lanes(num_lanes, models, num_tokens=4, num_sequences=2, is_ahead=False):
    names = itertools.cycle(models)
    return [
        LaneDriver(
            lane,
            next(names),
            [Sequence_(tuple(range(lane + 3 + idx)), num_tokens) for idx in range(num_sequences)],
            priority=lane % 2,
            is_ahead=is_ahead,
        )
        for lane in range(num_lanes)
    ]
