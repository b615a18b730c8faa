"""Doorbells: how a sleeping host (the thread or process of one or more ranks) learns that something came for it.

A doorbell is an eventfd where the system has them, else a pipe. It belongs to the cluster's parent, so it outlives the
host, and a host started anew finds it as its predecessor left it. Ringing costs a system call and a wake-up, so a host
says in a shared word when it may be asleep, and producers ring only then.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

from crosspool.cluster.fence import Fence
from crosspool.cluster.region import LINE_BYTES, Region


@dataclass(frozen=True, slots=True)
class Doorbell:
    """Two descriptors, the same one twice for an eventfd. Both ends are non-blocking."""

    read_fd: int
    write_fd: int

    @classmethod
    def create(cls) -> "Doorbell":
        if hasattr(os, "eventfd"):
            fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return cls(fd, fd)
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        return cls(read_fd, write_fd)

    @property
    def fds(self) -> tuple[int, ...]:
        return (self.read_fd,) if self.read_fd == self.write_fd else (self.read_fd, self.write_fd)

    def ring(self) -> None:
        """Make `read_fd` readable; safe from any thread or process."""
        try:
            os.write(self.write_fd, (1).to_bytes(8, "little"))
        except BlockingIOError:
            return  # already rung more often than the descriptor can count

    def drain(self) -> None:
        """Forget the rings so far."""
        try:
            while len(os.read(self.read_fd, 4096)) == 4096:
                pass
        except BlockingIOError:
            return  # nobody had rung

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class Board:
    """Shared words about every host, each in its own line: whether it may be asleep, its beat, its post, its answers.

    The beat grows with every turn of the host's loop; a host that owes work and does not beat hangs. The post grows
    after the parent has sent messages, so that a host that works need not ask the system whether some have come; the
    answers grow after the host has. The parent has a place behind the last host's, for its sleep.
    """

    def __init__(self, region: Region) -> None:
        self._words = region.map().cast("Q")

    @staticmethod
    def num_bytes(num_hosts: int) -> int:
        return _WORDS * LINE_BYTES * (num_hosts + 1)

    def may_sleep(self, host: int) -> bool:
        return self._words[_asleep(host)] != _AWAKE

    def set_asleep(self, host: int, asleep: bool) -> None:
        self._words[_asleep(host)] = _ASLEEP if asleep else _AWAKE

    def naps(self, host: int) -> bool:
        """Whether it may look away for a while, and not see its descriptors."""
        return self._words[_asleep(host)] == _NAPS

    def set_napping(self, host: int) -> None:
        """Until the next `set_asleep`."""
        self._words[_asleep(host)] = _NAPS

    def beat(self, host: int) -> int:
        return self._words[_beat(host)]

    def set_beat(self, host: int, beat: int) -> None:
        self._words[_beat(host)] = beat

    def post(self, host: int) -> int:
        return self._words[_post(host)]

    def add_post(self, host: int) -> None:
        self._words[_post(host)] += 1

    def answers(self, host: int) -> int:
        return self._words[_answers(host)]

    def add_answer(self, host: int) -> None:
        self._words[_answers(host)] += 1

    def close(self) -> None:
        """Let go of the memory; nothing can be read after it."""
        self._words.release()


def ringer(doorbell: Doorbell, board: Board, host: int) -> Callable[[], None]:
    """What a producer calls after it raised a flag: rings if the consumer's host may be asleep.

    The consumer marks itself asleep, and only then looks at its flags once more; the producer raises the flag, and only
    then looks at the mark. With a full fence in between on both sides one of them sees the other.
    """
    full_fence, may_sleep = Fence().full, board.may_sleep

    def ring() -> None:
        full_fence()
        if may_sleep(host):
            doorbell.ring()

    return ring


_WORDS = 4
_AWAKE, _ASLEEP, _NAPS = range(3)


def _asleep(host: int) -> int:
    return _WORDS * host * LINE_BYTES // 8


def _beat(host: int) -> int:
    return (_WORDS * host + 1) * LINE_BYTES // 8


def _post(host: int) -> int:
    return (_WORDS * host + 2) * LINE_BYTES // 8


def _answers(host: int) -> int:
    return (_WORDS * host + 3) * LINE_BYTES // 8
