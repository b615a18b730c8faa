"""Lines that ranks' processes write while this one draws bars on the terminal: printed above them, whole."""

import contextlib
import os
from collections.abc import Iterator
from threading import Thread

from rich.console import Console

JOIN_S = 1.0


@contextlib.contextmanager
def above_bars(console: Console) -> Iterator[int | None]:
    """A descriptor for ranks' processes to write to, as long as this is open; None where no bars are drawn."""
    if not console.is_terminal:
        yield None
        return
    readable, writable = os.pipe()
    thread = Thread(target=_print, args=(readable, console), name="crosspool-rank-lines", daemon=True)
    thread.start()
    try:
        yield writable
    finally:
        os.close(writable)
        thread.join(JOIN_S)  # ranks that live on, because they could not be ended, hold the other end


def _print(readable: int, console: Console) -> None:
    with open(readable, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            console.print(line.rstrip("\n"), markup=False, highlight=False, soft_wrap=True)
