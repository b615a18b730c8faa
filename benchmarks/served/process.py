"""`crosspool serve` in a process of its own, with models of true shapes."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.full_models import write_model_dir

PORT = 8123
START_TIMEOUT_S = 240


class ServedProcess:
    """`crosspool serve` in a process of its own."""

    def __init__(
        self,
        models: Sequence[str],
        kv_bytes: str,
        log: Path,
        more: Sequence[str] = (),
        parent: Path | None = None,
        num_layers: int | None = None,
    ) -> None:
        """parent: the directory of the models' checkpoints; None: random weights. num_layers: of these; None: all."""
        directory = parent or Path(tempfile.mkdtemp())
        paths = [str(directory / name if parent else write_model_dir(directory, name, num_layers)) for name in models]
        self._log = log.open("wb")
        command = [sys.executable, "-m", "crosspool", "serve", *paths, "--backend", "cuda"]
        command += ["--weights", "checkpoint" if parent else "random"]
        command += ["--kv-pool-bytes", kv_bytes, "--port", str(PORT), "--no-enable-prefix-caching", *more]
        self.begin = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def health(self) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5) as reply:
                return dict(json.load(reply))
        except urllib.error.HTTPError as error:
            return dict(json.load(error))

    def gauge(self, name: str, **labels: str) -> float:
        """The sum of a metric's series that have these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=5) as reply:
            lines = reply.read().decode().splitlines()
        series = [line for line in lines if re.match(rf"{name}[ {{]", line) and all(each in line for each in wanted)]
        if not series:
            raise RuntimeError(f"/metrics has no {name} with {labels}")
        return sum(float(line.rsplit(" ", 1)[1]) for line in series)

    def wait_ready(self) -> float:
        """Seconds from its start until every model may be asked."""
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}; see its log")
            if time.perf_counter() - self.begin > START_TIMEOUT_S:
                raise TimeoutError("the server is not ready")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health/ready", timeout=5):
                    return time.perf_counter() - self.begin
            except OSError:
                time.sleep(0.2)

    def rank_pid(self, rank: str) -> int:
        """The process of a rank: a descendant of the server whose command line has the rank's name."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().split(b"\0")
                is_rank = b"crosspool.cluster.rank_process" in words and rank.encode() in words
                if is_rank and self.process.pid in ancestors(pid := int(path.parent.name)):
                    return pid
        raise RuntimeError(f"no process of {rank}")

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._log.close()


def ancestors(pid: int) -> Iterator[int]:
    """Parents of a process, the nearest first. Raises OSError for one that has ended."""
    while pid > 1:
        stat = Path(f"/proc/{pid}/stat").read_text()
        pid = int(stat.rpartition(")")[2].split()[1])
        yield pid
