"""Control-plane code is pure: what the simulator drives has no clock, thread, await or I/O of its own."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

SOURCES = Path(importlib.util.find_spec("crosspool").origin).parent
ROOTS = ["engine/engine_core.py", "scheduler/order.py"] + [
    f"cluster/{name}.py" for name in ("supervisor", "roster", "channel_book", "cluster_steps")
]
"""Entry points. What they import of these packages is looked at too."""
PACKAGES = ("engine", "scheduler", "kv_pool")
IMPURE_MODULES = {
    *("asyncio", "concurrent", "ctypes", "datetime", "mmap", "multiprocessing", "os", "queue", "random"),
    *("select", "selectors", "signal", "socket", "subprocess", "sys", "tempfile", "threading", "time"),
}
IMPURE_CALLS = {"open", "print", "input", "exec", "eval"}
IMPURE_METHODS = {"exists", "glob", "is_dir", "is_file", "iterdir", "read_bytes", "read_text", "stat", "write_text"}
"""Of a Path, which may well be part of what is decided about."""


def impurities(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names if alias.name.split(".")[0] in IMPURE_MODULES]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in IMPURE_MODULES:
                found.append(module)
            case ast.Call(func=ast.Name(id=name)) if name in IMPURE_CALLS:
                found.append(f"{name}()")
            case ast.Attribute(attr=name) if name in IMPURE_METHODS:
                found.append(f".{name}")
            case ast.AsyncFunctionDef() | ast.Await() | ast.AsyncFor() | ast.AsyncWith():
                found.append("async")
    return found


def imported(source: str) -> list[Path]:
    """The modules of PACKAGES that a module imports."""
    names = [node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module]
    files = [SOURCES / f"{name.removeprefix('crosspool.').replace('.', '/')}.py" for name in names]
    return [file for file in files if file.exists() and file.relative_to(SOURCES).parts[0] in PACKAGES]


def control_plane() -> dict[str, str]:
    seen: dict[str, str] = {}
    left = [SOURCES / root for root in ROOTS]
    while left:
        file = left.pop()
        name = str(file.relative_to(SOURCES))
        if name not in seen:
            seen[name] = file.read_text(encoding="utf-8")
            left += imported(seen[name])
    return seen


def test_the_control_plane_has_no_clock_thread_await_or_io():
    modules = control_plane()
    named = {
        f"engine/{name}.py"
        for name in (
            *("engine_core", "admission", "intake", "queues", "endings", "rank_losses"),
            *("dispatcher", "turns", "lanes", "decode_steps", "steps_ahead", "prefill_steps", "parked_steps"),
            *("prefill_chunks", "step_start", "step_outcomes"),
        )
    }
    assert named | {"scheduler/step.py", "kv_pool/pool.py"} <= modules.keys()
    assert {name: found for name, source in modules.items() if (found := impurities(source))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import time",
        "from time import monotonic",
        "import os.path",
        "from threading import Lock",
        "async def admit(): ...",
        "open('x')",
        "path.read_text()",
        "from concurrent.futures import Future",
    ],
)
def test_an_impurity_is_found(line):
    assert impurities(f"def decide():\n    {line}\n")
