"""ServerLog: reads what a server process says, and finds its URL in it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading

START_TIMEOUT_S = 100


class ServerLog(threading.Thread):
    """Reads a server's standard error until it ends, so that the server never waits for a reader."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        assert process.stderr is not None
        self._stream = process.stderr
        self._process = process
        self.lines: list[str] = []
        self._urls: list[str] = []
        self._told = threading.Event()
        self.start()

    def run(self) -> None:
        for line in self._stream:
            self.lines.append(line)
            if match := re.search(r"serving .* on (http://[\w.:\[\]-]+)", line):
                self._urls.append(match[1])
                self._told.set()
        self._told.set()

    def url(self) -> str:
        assert self._told.wait(START_TIMEOUT_S)
        assert self._urls, "".join(self.lines)
        return self._urls[0]

    def close(self) -> None:
        self.join(5)
        self._stream.close()
        if self._process.returncode != 0:
            print("".join(self.lines), file=sys.stderr)
