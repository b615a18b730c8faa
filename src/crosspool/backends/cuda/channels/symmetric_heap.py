"""Channel memory out of NVSHMEM: one block that all ranks allocate together, cut up by each rank for itself.

Allocation in NVSHMEM is collective, links are not: so the collective part happens once, as ranks start, and a link then
takes a part of its rank's block and tells the peer how far in it lies. What kernels get is an address that they
store to, as with memory that the peer exported.
"""

from dataclasses import dataclass

from crosspool.backends.cuda.channels.nvshmem import Nvshmem
from crosspool.units import align_up

PART_ALIGNED = 256
"""Parts begin at multiples of so many bytes."""


@dataclass(frozen=True, slots=True)
class SymmetricPart:
    """A part of this rank's block, zeroed when it was made and never used for another link."""

    base: int
    offset: int  # in the block: how a peer finds it

    def close(self) -> None:
        """Kept: a put that comes late must find nobody else's rows here."""


class SymmetricHeap:
    """This rank's block and the way to those of its peers. numbers: of every rank, its place in the team."""

    def __init__(self, calls: Nvshmem, rank: str, numbers: dict[str, int], num_bytes: int) -> None:
        self._calls, self._rank, self._numbers, self._num_bytes = calls, rank, numbers, num_bytes
        self._base = calls.allocate(num_bytes)
        self._taken = 0

    def take(self, num_bytes: int) -> SymmetricPart:
        """Raises ValueError where the block is used up."""
        start = align_up(self._taken, PART_ALIGNED)
        if start + num_bytes > self._num_bytes:
            raise ValueError(
                f"{self._rank}: channels of {num_bytes} bytes more do not fit the {self._num_bytes} bytes that its "
                f"NVSHMEM block has, of which {self._taken} are taken; use transport peer, which has no such bound, or "
                "fewer lanes"
            )
        self._taken = start + num_bytes
        return SymmetricPart(self._base + start, start)

    def at_peer(self, peer: str, offset: int) -> int:
        """Address here of a part of the peer's block. Raises ValueError where kernels cannot store to it."""
        address = self._calls.address_at(self._base + offset, self._numbers[peer])
        if not address:
            raise ValueError(
                f"{self._rank}: {peer}'s memory cannot be stored to from here; channels by NVSHMEM stay within GPUs "
                "that reach each other, so use transport host"
            )
        return address
