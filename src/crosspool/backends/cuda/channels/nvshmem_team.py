"""How the ranks of a deployment become one NVSHMEM team: the first makes an id, the others ask it for that.

They must be processes of their own, each on its own GPU, and all come at their start: NVSHMEM has no way for a rank to
come back into its team.
"""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from crosspool.backends.cuda.channels import handoff
from crosspool.backends.cuda.channels.nvshmem import ID_BYTES, Nvshmem, NvshmemLibrary
from crosspool.backends.cuda.channels.symmetric_heap import SymmetricHeap
from crosspool.units import MiB

logger = logging.getLogger(__name__)

SPARE_BYTES = 64 * MiB
"""What NVSHMEM may take for itself."""

TIMEOUT_S = 60.0
"""How long a rank waits for the first one's id."""


@dataclass(frozen=True, slots=True)
class Team:
    """Who joins, under which token of the deployment (hexadecimal digits), and the bytes that each has for channels."""

    ranks: tuple[str, ...]
    token: str
    num_bytes: int

    def join(self, rank: str) -> SymmetricHeap:
        """The rank's memory, once all have come; its GPU must be this process's current one."""
        calls = NvshmemLibrary(self.num_bytes + SPARE_BYTES)
        return SymmetricHeap(calls, rank, join_team(calls, rank, self.ranks, self.token), self.num_bytes)


def join_team(calls: Nvshmem, rank: str, ranks: Sequence[str], token: str) -> dict[str, int]:
    """Join, once all `ranks` have; gives each one's number. token: the deployment's, as hexadecimal digits.

    Raises ValueError where the first rank does not come in time.
    """
    numbers = {name: number for number, name in enumerate(ranks)}
    name, key, begin_s = f"crosspool-team-{token}", bytes.fromhex(token), time.monotonic()
    if rank == ranks[0]:
        unique_id = calls.unique_id()
        server = handoff.DescriptorServer(name)
        server.offer(_as_file(unique_id), key)
        calls.join(0, len(ranks), unique_id)
        server.withdraw(key)
    else:
        late = f"{ranks[0]} did not call {rank} into the NVSHMEM team"
        fd = handoff.fetch_in_time(handoff.Offer(0, 0, 0, ID_BYTES, key, name), TIMEOUT_S, late)
        try:
            unique_id = os.pread(fd, ID_BYTES, 0)
        finally:
            os.close(fd)
        calls.join(numbers[rank], len(ranks), unique_id)
    logger.info("%s: one of %d in an NVSHMEM team after %.1f s", rank, len(ranks), time.monotonic() - begin_s)
    return numbers


def _as_file(content: bytes) -> int:
    """A descriptor of memory that holds it."""
    fd = os.memfd_create("crosspool-team-id")
    os.pwrite(fd, content, 0)
    return fd
