"""What a start says: bars on a terminal, lines elsewhere, records where every line is to be JSON."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from threading import Thread

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from crosspool.config import LogFormat
from crosspool.engine.async_engine import AsyncEngine
from crosspool.units import format_bytes

logger = logging.getLogger(__name__)


class Notices(Console):
    """Standard error, for what is said on the way: when its reader goes, the command goes on without a word.

    NOTE: a console of rich itself ends the process then, and closes standard output before.
    """

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        self.quiet = True


JOIN_S = 1.0
REFRESH_S = 0.1

Tell = Callable[[str], None]


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


def teller(console: Console, log_format: LogFormat = "auto") -> Tell:
    """Prints a line on `console`; with `json` it is a log record, so that nothing else stands between the objects.

    A console that takes no more (its disk is full, its reader gone) ends nothing: log records are lost there too.
    """
    if log_format == "json":
        return logger.info

    def tell(line: str) -> None:
        with contextlib.suppress(OSError):
            console.print(line, highlight=False, soft_wrap=True)

    return tell


@contextlib.contextmanager
def shown_while_loading(engine: AsyncEngine, console: Console, tell: Tell) -> Iterator[None]:
    """Shows the engine's models as their bytes arrive, then tells what each takes; entered on a running event loop."""
    progress = Progress(
        TextColumn("loading {task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with progress:
        watching = asyncio.create_task(_watch(engine, progress, console), name="loading progress")
        try:
            yield
            _report(engine, tell)
        finally:
            watching.cancel()


async def _watch(engine: AsyncEngine, progress: Progress, console: Console) -> None:
    tasks: dict[str, TaskID] = {}
    while True:
        for model in engine.models():
            if model.name not in tasks:
                tasks[model.name] = progress.add_task(model.name, total=None)
            progress.update(tasks[model.name], completed=model.loaded_bytes, total=model.total_bytes or None)
        await asyncio.sleep(REFRESH_S)


def _report(engine: AsyncEngine, tell: Tell) -> None:
    for model in engine.models():
        size = format_bytes(sum(model.bytes_by_rank.values()))
        where = ", ".join(f"{rank} {format_bytes(part)}" for rank, part in sorted(model.bytes_by_rank.items()))
        tell(
            f"loaded {model.name}: {size} ({where}) in {model.load_s or 0:.2f} s, context {model.context_limit} tokens"
        )
    for rank, kinds in sorted(engine.memory_bytes().items()):
        parts = [
            f"{kind} {format_bytes(size)}" for kind, size in sorted(kinds.items(), key=lambda item: -item[1]) if size
        ]
        if parts:
            tell(f"memory of {rank}: {format_bytes(sum(kinds.values()))} ({', '.join(parts)})")
