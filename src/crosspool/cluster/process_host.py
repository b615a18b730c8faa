"""Layout `processes`: each host is a child process; messages cross a socket pair, channels lie in memory files."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.control import ControlSocket
from crosspool.cluster.doorbell import Board, Doorbell
from crosspool.cluster.fence import Fence
from crosspool.cluster.messages import Boot, FromRank, ToRank, may_wait
from crosspool.cluster.region import FileRegion

logger = logging.getLogger(__name__)

KILL_TIMEOUT_S = 10.0
"""How long the system may take to end a killed process."""

STACKS_SIGNAL = signal.SIGUSR1
"""Makes a host's process write the stacks of its threads to its standard error."""

GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a supervisor's SIGTERM and the terminal's end reach the whole process group: the parent decides then."""

STACKS_S = 0.05
"""What a process that hangs gets to do so."""

_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class Spawner:
    """The one thread that starts child processes.

    NOTE: Linux ties "die with the parent" to the *thread* that started the child. A thread that lives as long as the
    cluster keeps its children alive whichever thread asks for a restart, and ends them when this process ends.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="crosspool-spawner", initializer=_hold_signals)

    def start(
        self, arguments: Sequence[str], fds: Sequence[int], variables: dict[str, str], stderr: int | None = None
    ) -> subprocess.Popen[bytes]:
        """A child that inherits `fds` and nothing else but the standard streams, or `stderr` in place of that one."""

        def popen() -> subprocess.Popen[bytes]:
            return subprocess.Popen(arguments, pass_fds=fds, env=variables, stdin=subprocess.DEVNULL, stderr=stderr)

        return self._thread.submit(popen).result()

    def close(self) -> None:
        self._thread.shutdown()


def _hold_signals() -> None:
    """Children begin with what this thread holds back: Ctrl-C must not end one before it can say that it ignores it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)


class ProcessHost:
    """A host that is a child process (`host.Host`)."""

    def __init__(
        self,
        config: ClusterConfig,
        host: int,
        doorbells: Sequence[Doorbell],
        board: Board,
        board_file: FileRegion,
        spawner: Spawner,
    ) -> None:
        self.ranks = config.all_hosts[host]
        self._config = config
        self._host = host
        self._doorbells = tuple(doorbells)
        self._board = board
        self._board_file = board_file
        self._spawner = spawner
        self._num_launches = 0
        self._fence = Fence()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: ControlSocket[FromRank, ToRank] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    def launch(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fds = [theirs.fileno(), *(fd for doorbell in self._doorbells for fd in doorbell.fds)]
            command = [sys.executable, "-P", "-m", "crosspool.cluster.rank_process", str(theirs.fileno()), *self.ranks]
            try:
                self._process = self._spawner.start(command, fds, self._variables(), self._config.log.fd)
            except OSError:
                ours.close()
                raise
        self._control = ControlSocket(ours)
        self._num_launches += 1
        boot = Boot(
            self._config, self._host, self._doorbells, self._board_file, os.getpid(), num_launches=self._num_launches
        )
        self.send(self.ranks[0], boot)

    def send(self, rank: str, message: ToRank) -> None:
        if self._control is not None:
            self._control.queue((rank, message))
            self._board.add_post(self._host)
            if not may_wait(message):
                self._end_nap()

    def flush(self) -> bool:
        if self._control is None or not self._control.has_unsent:
            return False
        self._control.flush()
        self._board.add_post(self._host)
        self._end_nap()
        return self._control.has_unsent

    def receive(self) -> Sequence[tuple[str, FromRank]]:
        return [] if self._control is None else self._control.receive()

    def fd(self) -> int | None:
        return None if self._control is None else self._control.fd

    def nudge(self) -> None:
        self._doorbells[self._host].ring()

    def _end_nap(self) -> None:
        """A host that sleeps is woken by its socket; one that naps may look at its doorbell alone."""
        self._fence.full()  # see `doorbell.ringer`: posted first, looked at last
        if self._board.naps(self._host):
            self._doorbells[self._host].ring()

    def show_stacks(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(STACKS_SIGNAL)  # a stopped process does not hear it
            time.sleep(STACKS_S)

    def kill(self) -> bool:
        if self._process is not None and self._process.returncode is None:
            if self._control is not None and self._process.poll() is None:
                self._process.kill()
            self._reap()
        self._close_control()
        return True

    def last_words(self) -> str:
        assert self._process is not None
        code = self._process.returncode
        if code is None:
            return "it does not end"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def end(self, until_s: float) -> bool:
        if self._process is not None and self._process.returncode is None:
            try:
                self._process.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("%s did not stop in time; killing it", ", ".join(self.ranks))
        self.kill()
        return self.pid is None

    def _reap(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.error("process %d of %s does not end after SIGKILL", self._process.pid, ", ".join(self.ranks))

    def _close_control(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def _variables(self) -> dict[str, str]:
        """The child's environment: numpy must find the thread limits when it is first imported."""
        paths = [path or os.getcwd() for path in sys.path]
        threads = dict.fromkeys(_THREAD_VARIABLES, str(self._config.threads_per_rank))
        return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)}
