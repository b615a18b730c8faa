"""How a descriptor reaches the one process it is for: a key in a region that both map, and a socket that asks for it.

Pairwise on purpose: a rank that was started anew meets each peer alone, whenever either is ready.
"""

import logging
import os
import secrets
import socket
import struct
import threading
import time
from dataclasses import dataclass

from crosspool.cluster.fence import Fence

logger = logging.getLogger(__name__)

_RECORD = struct.Struct("<IIQQ16s80s")
_WORD_BYTES = 8
_IS_PUBLISHED = 0x43524F5353504F4C
RECORD_BYTES = _WORD_BYTES + _RECORD.size

_TIMEOUT_S = 5.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Offer:
    """Memory that its owner offers to one peer: an address for a peer in the same process, a descriptor for others.

    Of memory by NVSHMEM, `address` says how far in its owner's block it lies.
    """

    pid: int
    device: int
    address: int
    num_bytes: int
    key: bytes = b""
    server: str = ""

    @property
    def is_of_this_process(self) -> bool:
        return self.pid == os.getpid()


def publish(region: memoryview, offer: Offer) -> None:
    """Write the offer at the start of a zeroed region, then the word that tells of it."""
    fields = (offer.pid, offer.device, offer.address, offer.num_bytes, offer.key, offer.server.encode())
    region[_WORD_BYTES:RECORD_BYTES] = _RECORD.pack(*fields)
    Fence().stores_or_loads()
    region[:_WORD_BYTES].cast("Q")[0] = _IS_PUBLISHED


def find(region: memoryview) -> Offer | None:
    """The offer in a region, or None as long as there is none."""
    if region[:_WORD_BYTES].cast("Q")[0] != _IS_PUBLISHED:
        return None
    Fence().stores_or_loads()
    pid, device, address, num_bytes, key, server = _RECORD.unpack(region[_WORD_BYTES:RECORD_BYTES])
    return Offer(pid, device, address, num_bytes, key, server.rstrip(b"\0").decode())


class DescriptorServer:
    """Hands descriptors of this process to peers that show the key. One daemon thread, an abstract socket (Linux)."""

    def __init__(self, name: str | None = None) -> None:
        """name: of the socket; None: one that only an offer tells."""
        self.name = name or f"crosspool-{os.getpid()}-{secrets.token_hex(8)}"
        self._fds: dict[bytes, int] = {}
        self._lock = threading.Lock()  # a descriptor that is being given is not closed: its number may come again
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + self.name)
        self._socket.listen(16)
        threading.Thread(target=self._serve, name="crosspool-descriptors", daemon=True).start()

    def offer(self, fd: int, key: bytes | None = None) -> bytes:
        """Own `fd` and give it to whoever shows the returned key of 16 bytes, which is `key` if one is given."""
        key = key or secrets.token_bytes(16)
        self._fds[key] = fd
        return key

    def withdraw(self, key: bytes) -> None:
        with self._lock:
            fd = self._fds.pop(key, None)
            if fd is not None:
                os.close(fd)

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError as failure:  # no descriptor is left, or that peer is gone: others are served later
                logger.warning("%s: no peer could be taken: %s", self.name, failure)
                time.sleep(_POLL_S)
                continue
            with peer:
                peer.settimeout(_TIMEOUT_S)
                try:
                    key = peer.recv(16)
                    with self._lock:
                        fd = self._fds.get(key)
                        if fd is not None:
                            socket.send_fds(peer, [b"!"], [fd])
                except OSError:
                    continue  # that peer is gone or silent; it asks again or is started anew


def fetch(offer: Offer) -> int:
    """The offered descriptor, now this process's own. Raises ConnectionError where its owner is gone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(_TIMEOUT_S)
        peer.connect("\0" + offer.server)
        peer.sendall(offer.key)
        _, fds, _, _ = socket.recv_fds(peer, 1, 1)
    if not fds:
        raise ConnectionError(f"process {offer.pid} no longer offers the channel memory on its device {offer.device}")
    return fds[0]


def fetch_in_time(offer: Offer, timeout_s: float, late: str) -> int:
    """The same of an owner that may still be starting. Raises ValueError, which begins with `late`, if none comes."""
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            return fetch(offer)
        except OSError as failure:
            if time.monotonic() > until_s:
                raise ValueError(f"{late} within {timeout_s:g} s: {failure}") from None
        time.sleep(_POLL_S)
