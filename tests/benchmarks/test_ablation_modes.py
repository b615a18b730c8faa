"""Which of the ablation's modes a backend runs, and which it says that it leaves out."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks.bench_ablation import MODES, left_out, modes_of, summary


def options(backend: str, modes: str = ",".join(MODES)) -> Namespace:
    return Namespace(backend=backend, modes=modes, streams=2)


def test_gpus_run_all_modes_of_one_command() -> None:
    assert modes_of(options("cuda")) == ["off", "resident", "pipeline", "both", "graphs", "graphs_pipeline"]
    assert left_out(options("cuda")) == []


def test_numpy_ranks_run_what_hosts_drive_and_the_result_says_what_is_left_out() -> None:
    given = options("numpy", "off,resident_ahead,pipeline,graphs")
    assert modes_of(given) == ["off", "pipeline"]
    assert left_out(given) == ["resident_ahead", "graphs"]
    assert "resident_ahead, graphs" in summary(given)


def test_a_mode_that_nobody_knows_is_told_in_one_line() -> None:
    with pytest.raises(SystemExit, match="unknown mode 'fast': choose from off, resident"):
        modes_of(options("cuda", "off,fast"))
