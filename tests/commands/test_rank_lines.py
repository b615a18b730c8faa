"""Lines of ranks' processes come whole, above the bars of a terminal."""

from __future__ import annotations

import io
import os

from rich.console import Console

from crosspool.commands.loading import above_bars


def test_lines_are_printed_as_they_are_written():
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=40, color_system=None)
    with above_bars(console) as descriptor:
        assert descriptor is not None
        os.write(
            descriptor, b"INFO p0: [bold]qwen[/bold] came in 1.1 s, which is a line longer than the terminal\nhalf"
        )
        os.write(descriptor, b" and half\n")
    assert shown.getvalue().splitlines() == [
        "INFO p0: [bold]qwen[/bold] came in 1.1 s, which is a line longer than the terminal",
        "half and half",
    ]


def test_without_a_terminal_ranks_keep_their_standard_error():
    with above_bars(Console(file=io.StringIO())) as descriptor:
        assert descriptor is None
