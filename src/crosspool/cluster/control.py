"""Control sockets: whole messages, with the descriptors of their regions, between the parent and a host process.

A frame is a length, a number of descriptors and a pickle. The socket is a private pair, so only this program's own
processes ever write to it. Unix only: descriptors cross by SCM_RIGHTS.
"""

import os
import socket
import struct
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from crosspool.cluster.messages import Boot, FromRank, OpenChannels, ToRank
from crosspool.cluster.region import FileRegion
from crosspool.cluster.wire import dumps, loads

In = TypeVar("In", ToRank, FromRank)
Out = TypeVar("Out", ToRank, FromRank)

_HEADER = struct.Struct("<IH")
_CHUNK_BYTES = 1 << 16
_FDS_BYTES = socket.CMSG_SPACE(32 * struct.calcsize("i"))
_RECEIVE_FLAGS = socket.MSG_DONTWAIT | getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class ControlSocket(Generic[In, Out]):
    """One end. Every message comes with the name of the rank that it is for, or from.

    The parent queues, since a stopped process reads nothing; a host sends at once and may block.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self._in = bytearray()
        self._in_fds: deque[int] = deque()
        self._is_ended = False

    @property
    def fd(self) -> int:
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._out)

    def send(self, message: tuple[str, Out]) -> None:
        """Send the whole message; blocks while the other side does not read. Raises OSError if it is gone."""
        frame, fds = _encode(message)
        sent = socket.send_fds(self._sock, [frame], fds) if fds else self._sock.send(frame)
        if sent < len(frame):
            self._sock.sendall(memoryview(frame)[sent:])
        _close_fds(fds)

    def queue(self, message: tuple[str, Out]) -> None:
        """Send what the socket takes now and keep the rest for `flush`; never blocks."""
        frame, fds = _encode(message)
        self._out.append((memoryview(frame), fds))
        self.flush()

    def flush(self) -> None:
        """Send more of what was queued. What a dead peer will not read is dropped; `receive` tells of its death."""
        try:
            while self._out:
                data, fds = self._out[0]
                if fds:
                    sent = socket.send_fds(self._sock, [data], fds, socket.MSG_DONTWAIT)
                else:
                    sent = self._sock.send(data, socket.MSG_DONTWAIT)
                _close_fds(fds)
                self._out.popleft()
                if sent < len(data):
                    self._out.appendleft((data[sent:], []))
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self._drop_unsent()

    def receive(self) -> list[tuple[str, In]]:
        """Messages that have arrived; never blocks. Raises EOFError once all are read and the other side is gone."""
        while not self._is_ended:
            try:
                data, ancillary, _, _ = self._sock.recvmsg(_CHUNK_BYTES, _FDS_BYTES, _RECEIVE_FLAGS)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data, ancillary = b"", []
            self._in += data
            for _, _, fds in ancillary:
                self._in_fds.extend(memoryview(fds).cast("i"))
            self._is_ended = not data
            if len(data) < _CHUNK_BYTES:
                break
        messages = self._complete()
        if self._is_ended and not messages:
            raise EOFError("the other side of the control socket is gone")
        return messages

    def close(self) -> None:
        self._drop_unsent()
        _close_fds(self._in_fds)
        self._in_fds.clear()
        self._sock.close()

    def _complete(self) -> list[tuple[str, In]]:
        messages: list[tuple[str, In]] = []
        start = 0
        while len(self._in) - start >= _HEADER.size:
            length, num_fds = _HEADER.unpack_from(self._in, start)
            end = start + _HEADER.size + length
            if len(self._in) < end:
                break
            rank, message = loads(memoryview(self._in)[start + _HEADER.size : end])
            if num_fds:
                _attach(message, [self._in_fds.popleft() for _ in range(num_fds)])
            messages.append((rank, message))
            start = end
        if start:
            del self._in[:start]
        return messages

    def _drop_unsent(self) -> None:
        for _, fds in self._out:
            _close_fds(fds)
        self._out.clear()


def _encode(message: tuple[str, ToRank | FromRank]) -> tuple[bytes, list[int]]:
    """The frame, and the descriptors that go with it; they are duplicates, closed once they are sent."""
    region = _region(message[1])
    fds = [] if region is None else [os.dup(region.fd)]
    payload = dumps(message)
    return _HEADER.pack(len(payload), len(fds)) + payload, fds


def _attach(message: ToRank | FromRank, fds: Iterable[int]) -> None:
    region = _region(message)
    assert region is not None, f"{type(message).__name__} carries no region"
    (region.fd,) = fds


def _region(message: ToRank | FromRank) -> FileRegion | None:
    """The memory file that a message hands over."""
    if isinstance(message, Boot):
        return message.board
    if isinstance(message, OpenChannels) and isinstance(message.region, FileRegion):
        return message.region
    return None


def _close_fds(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
