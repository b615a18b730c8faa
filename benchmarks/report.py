"""Writes the two files of a kept benchmark result: JSON for machines, a Markdown table for people.

    report = Report("decode", hardware="cpu", config={"batch": 1}, seed=7)
    report.samples("tbt_ms", tbt_ms, limit=1.2, note="weight bytes / memory bandwidth")
    report.metric("decode_ratio_vs_transformers.b1", 5.1)
    report.write()

Run scripts from the repository root as ``python -m benchmarks.bench_decode``.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PERCENTILES = (50, 95, 99)
PACKAGES = (
    *("crosspool", "numpy", "tokenizers", "transformers", "torch", "triton", "cuda-bindings"),
    *("uvicorn", "uvloop", "httptools"),
)


@dataclass
class Report:
    """Metrics of one benchmark run and everything needed to run it again.

    `what` and `hardware` name the files, so they are short: lower-case letters, digits, dots, dashes, underscores.
    """

    what: str
    hardware: str  # short name, for example "cpu" or "h200-x2"
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    summary: str = ""  # what was measured and what the numbers say, losses included
    origin: Mapping[str, Any] = field(
        default_factory=dict
    )  # hardware, commit, command, versions where measured elsewhere
    date: datetime.date = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).date())
    metrics: dict[str, float] = field(default_factory=dict, init=False)
    limits: dict[str, float] = field(default_factory=dict, init=False)
    notes: dict[str, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for name in (self.what, self.hardware):
            if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
                raise ValueError(f"{name!r} becomes part of a file name; use lower-case letters, digits and . _ -")

    def metric(self, name: str, value: float, *, limit: float | None = None, note: str = "") -> None:
        """Add one figure. `limit` is the physical limit in the same unit; `note` says where the limit comes from."""
        if name in self.metrics:
            raise ValueError(f"metric {name!r} is reported twice")
        self.metrics[name] = _finite(name, value)
        if limit is not None:
            self.limits[name] = _finite(f"limit of {name}", limit)
        if note:
            self.notes[name] = note

    def samples(self, name: str, values: Sequence[float], *, limit: float | None = None, note: str = "") -> None:
        """Add p50, p95, p99 and the number of samples taken after warm-up; limit and note stand beside the median."""
        if not len(values):
            raise ValueError(f"metric {name!r} has no samples")
        p50, *tail = np.percentile(np.asarray(values, dtype=np.float64), PERCENTILES)
        self.metric(f"{name}.p50", float(p50), limit=limit, note=note)
        for percentile, value in zip(PERCENTILES[1:], tail, strict=True):
            self.metric(f"{name}.p{percentile}", float(value))
        self.metric(f"{name}.num_samples", len(values))

    def as_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "hardware": {"name": self.hardware, **self.origin.get("hardware", describe_hardware())},
            "date": self.date.isoformat(),
            "commit": self.origin.get("commit", describe_commit()),
            "command": self.origin.get("command", describe_command()),
            "config": dict(self.config),
            "seed": self.seed,
            "versions": self.origin.get("versions", installed_versions()),
            "summary": self.summary,
            "metrics": dict(self.metrics),
            "limits": dict(self.limits),
            "notes": dict(self.notes),
        }

    def as_markdown(self) -> str:
        facts = self.as_dict()
        rows = [
            f"| {name} | {_number(value)} | {_number(self.limits.get(name))} | {_cell(self.notes.get(name, ''))} |"
            for name, value in self.metrics.items()
        ]
        table = ["| metric | value | limit | note |", "| --- | ---: | ---: | --- |", *rows]
        origin = [
            f"- hardware: {_listing(facts['hardware'])}",
            f"- commit: {facts['commit']}",
            f"- command: `{facts['command']}`",
            f"- config: {_listing(facts['config'])}; seed {self.seed}",
            f"- versions: {_listing(facts['versions'])}",
        ]
        title = f"# {self.what}, {self.hardware}, {self.date.isoformat()}"
        parts = [title, self.summary, "\n".join(table), "\n".join(origin)]
        return "\n\n".join(part for part in parts if part) + "\n"

    @property
    def stem(self) -> str:
        """Of the files' names."""
        return f"{self.what}_{self.hardware}_{self.date.isoformat()}"

    def write(self, directory: Path = RESULTS) -> tuple[Path, Path]:
        """Write `<what>_<hardware>_<date>.json` and its `.md` twin; returns both paths.

        Pictures that lie in `directory` already, as `<what>_<hardware>_<date>_<label>.svg`, are shown in the Markdown.
        """
        directory.mkdir(parents=True, exist_ok=True)
        json_path, markdown_path = directory / f"{self.stem}.json", directory / f"{self.stem}.md"
        json_path.write_text(json.dumps(self.as_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        pictures = sorted(directory.glob(f"{self.stem}_*.svg"))
        markdown_path.write_text(with_pictures(self.as_markdown(), pictures), encoding="utf-8")
        return json_path, markdown_path


def with_pictures(markdown: str, pictures: Sequence[Path]) -> str:
    """The text, with those pictures of its own directory at its end that it does not show yet."""
    links = [f"![{path.stem}]({path.name})" for path in pictures if f"({path.name})" not in markdown]
    return "\n\n".join([markdown.rstrip("\n"), *links]) + "\n"


def describe_hardware() -> dict[str, Any]:
    """CPU, cores usable by this process, memory; GPUs where the benchmark has imported torch."""
    facts: dict[str, Any] = {"cpu": _cpu_name(), "num_cores": _usable_cores(), "system": platform.system()}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["memory_gib"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return facts


def describe_commit() -> str:
    """The checked-out commit, with `-dirty` appended when sources differ from it.

    Outside a checkout what the file COMMIT beside `benchmarks` says, which a copy of one may bring; else `unknown`.
    """
    copied = ROOT / "COMMIT"
    if copied.is_file():
        return copied.read_text(encoding="utf-8").strip()
    try:
        commit = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if changed else commit


def describe_command() -> str:
    """This process's command line, without the directories that differ from machine to machine."""
    original = [Path(arg).name if os.path.isabs(arg) else arg for arg in sys.orig_argv]
    return shlex.join(original)


def installed_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (found := re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)):
        return found.group(1).strip()
    return platform.processor() or platform.machine()


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _finite(name: str, value: float) -> float:
    """A plain int or float, so that the JSON holds numbers only."""
    number = value if isinstance(value, int) and not isinstance(value, bool) else float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} is {value}, not a number that can be compared later")
    return number


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _listing(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items()) or "none"
