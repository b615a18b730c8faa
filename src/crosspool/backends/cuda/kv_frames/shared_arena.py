"""One arena of frames for several processes of a GPU: the first one's physical memory, mapped by the others.

So models that are served by processes of their own share the KV memory of their GPU. Which frames are whose is the
engine's affair; a frame has one owner at a time.
"""

import os

import torch

from crosspool.backends.cuda.channels import handoff
from crosspool.backends.cuda.channels.peer_memory import ExportedMemory, ImportedMemory
from crosspool.backends.cuda.device.device_bytes import device_bytes
from crosspool.backends.cuda.device.driver import Driver

OWNER_TIMEOUT_S = 60.0
"""How long a process waits for the one that makes the arena."""


class SharedArena:
    """(num_frames, frame_bytes) uint8 as `frames`, zeroed by its owner, the first of `ranks`.

    token: the deployment's, without which nobody is given the memory. The others keep the memory of an owner that has
    died; one that comes back makes an arena of its own, which holds the frames that its models take from then on.
    """

    def __init__(
        self, driver: Driver, device: torch.device, shape: tuple[int, int], ranks: tuple[str, ...], token: str
    ) -> None:
        num_bytes, index = shape[0] * shape[1], device.index or 0
        name, key = f"crosspool-arena-{token}-{ranks[0]}", bytes.fromhex(token)
        self._memory: ExportedMemory | ImportedMemory
        if driver.rank == ranks[0]:
            self._memory = exported = ExportedMemory(driver, num_bytes, index)
            self._server = handoff.DescriptorServer(name)
            self._server.offer(exported.fd, key)
        else:
            offer = handoff.Offer(0, index, 0, num_bytes, key, name)
            fd = _fetch(offer, ranks[0])
            try:
                self._memory = ImportedMemory(driver, fd, num_bytes, index)
            finally:
                os.close(fd)
        self.frames = device_bytes(self._memory.base, shape, device)


def _fetch(offer: handoff.Offer, owner: str) -> int:
    late = f"{owner} did not make the KV memory that this rank shares"
    return handoff.fetch_in_time(offer, OWNER_TIMEOUT_S, late)
