"""One lane's two channels between this rank and a peer, in memory that GPUs reach."""

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from crosspool.backends.base import FloatArray
from crosspool.backends.cuda.channels import handoff
from crosspool.backends.cuda.channels.channel_map import ChannelMap, LinkMap
from crosspool.backends.cuda.channels.peer_memory import (
    ExportedMemory,
    ImportedMemory,
    Memory,
    PlainMemory,
    RegisteredMemory,
)
from crosspool.backends.cuda.channels.symmetric_heap import SymmetricHeap
from crosspool.backends.cuda.device.driver import Driver
from crosspool.backends.cuda.device.sm_partition import SmPartition
from crosspool.backends.cuda.steps.lane_memory import LaneMemory
from crosspool.cluster.channel import a2f_part, channel_bytes, f2a_part
from crosspool.pools_config import Transport
from crosspool.scheduler.step import LAYERS_PER_STEP

logger = logging.getLogger(__name__)

Path = Literal["peer", "host", "nvshmem"]

OPEN_EPOCH = 0
"""`DeviceInlet.arrived(OPEN_EPOCH)` tells whether the peer's end is open."""


@dataclass(frozen=True)
class Site:
    """Where a rank's worker runs, and what it needs to open links from there."""

    rank: str
    device: torch.device
    driver: Driver
    devices: Mapping[str, int]  # of every rank
    server: handoff.DescriptorServer | None  # None: every peer lives in this process
    partition: SmPartition | None = None  # where prompts run while others decode
    transport: Transport = "auto"
    heap: SymmetricHeap | None = None  # of channels by NVSHMEM
    first_prompt_lane: int = 0  # of `ClusterConfig`

    @property
    def index(self) -> int:
        return self.device.index or 0

    @property
    def is_alone(self) -> bool:
        """Whether no other rank of the deployment has its GPU."""
        return list(self.devices.values()).count(self.index) <= 1

    def path_to(self, peer: str) -> Path:
        """How channels with a peer run: GPU to GPU, or through the host. Both ends find the same answer.

        Raises ValueError where the transport that was asked for cannot be had.
        """
        if self.heap is not None:
            return "nvshmem"
        if self.transport == "host":
            return "host"
        if self.device.type != "cuda" or self.driver.reach_each_other(self.index, self.devices[peer]):
            return "peer"
        if self.transport == "peer":
            raise ValueError(
                f"transport is peer, but device {self.index} of {self.rank} and device {self.devices[peer]} of {peer} "
                "cannot reach each other's memory; use transport auto or host"
            )
        logger.warning(
            "%s: device %d and %s's device %d cannot reach each other's memory; hidden states go through the host",
            self.rank,
            self.index,
            peer,
            self.devices[peer],
        )
        return "host"


class Link(Protocol):
    """One lane's way to a peer, as a lane keeps it."""

    @property
    def inbox(self) -> ChannelMap: ...

    @property
    def num_bytes(self) -> int: ...

    def is_open(self) -> bool: ...

    def map(self) -> LinkMap: ...

    def close(self) -> None: ...


class DeviceLink:
    """Both channels of one link: `inbox` is this rank's memory, `outbox` the peer's once that has offered it."""

    def __init__(self, site: Site, peer: str, region: memoryview, capacity: int, is_kv: bool) -> None:
        path = site.path_to(peer)
        self._site, self._peer, self._capacity = site, peer, capacity
        a2f, f2a = a2f_part(region, capacity), f2a_part(region, capacity)
        own, self._theirs = (f2a, a2f) if is_kv else (a2f, f2a)
        self._owned: list[Memory] = []
        self._outbox: int | None = None  # its address here
        self._lock = threading.Lock()  # a load prepares passes in a thread of its own
        self._key = b""
        num_bytes = channel_bytes(capacity)
        inbox: Memory
        if path == "nvshmem":
            assert site.heap is not None
            inbox = part = site.heap.take(num_bytes)
            own_base = part.base
            handoff.publish(own, handoff.Offer(os.getpid(), site.index, part.offset, num_bytes))
        elif path == "host":
            inbox = RegisteredMemory(site.driver, region)
            first, second = inbox.base, inbox.base + num_bytes
            own_base, self._outbox = (second, first) if is_kv else (first, second)
        elif site.server is None:
            inbox = PlainMemory(num_bytes, site.device)
            own_base = inbox.base
            handoff.publish(own, handoff.Offer(os.getpid(), site.index, own_base, num_bytes))
        else:
            inbox = exported = ExportedMemory(site.driver, num_bytes, site.index)
            own_base, self._key = exported.base, site.server.offer(exported.fd)
            offer = handoff.Offer(os.getpid(), site.index, own_base, exported.num_bytes, self._key, site.server.name)
            handoff.publish(own, offer)
        self._owned.append(inbox)
        self.inbox = ChannelMap(own_base, capacity)
        self.num_bytes = num_bytes
        logger.info("%s: channels with %s by the %s path, %d bytes each", site.rank, peer, path, num_bytes)

    def is_open(self) -> bool:
        """Whether the peer's memory is mapped here; maps it once the peer has offered it."""
        if self._outbox is not None:
            return True
        with self._lock:
            if self._outbox is None:
                offer = handoff.find(self._theirs)
                if offer is None:
                    return False
                self._outbox = self._accept(offer)
            return True

    def map(self) -> LinkMap:
        assert self._outbox is not None, f"{self._site.rank}: the link to {self._peer} is not open"
        return LinkMap(self.inbox, ChannelMap(self._outbox, self._capacity))

    def close(self) -> None:
        """Let go of both ends. No kernel that uses them may be under way."""
        if self._site.server is not None and self._key:
            self._site.server.withdraw(self._key)
        for memory in self._owned:
            memory.close()
        self._owned.clear()

    def _accept(self, offer: handoff.Offer) -> int:
        """The address here of what the peer offers."""
        site = self._site
        if site.heap is not None:
            return site.heap.at_peer(self._peer, offer.address)
        if offer.is_of_this_process and (site.server is None or offer.device == site.index):
            if site.device.type == "cuda" and offer.device != site.index:
                site.driver.enable_peer_access(offer.device)
            return offer.address
        fd = handoff.fetch(offer)
        try:
            memory = ImportedMemory(site.driver, fd, offer.num_bytes, site.index)
        finally:
            os.close(fd)
        self._owned.append(memory)
        logger.info(
            "%s: mapped %s's channel, %d bytes on device %d", site.rank, self._peer, offer.num_bytes, offer.device
        )
        return memory.base


class DeviceInlet:
    """The consumer's end as the rank's loop sees it (`backends.base.Inlet`): it tells when a whole step has ended.

    index: the peer's place in the model that runs, set before each step. has_come: while a step is handed over in bits,
    whether the device has come as far as is waited for; None: the end of a pass is.
    """

    def __init__(self, lane: LaneMemory, link: Link) -> None:
        self._lane = lane
        self.link = link
        self.index = 0
        self.has_come: Callable[[], bool] | None = None

    def arrived(self, epoch: int) -> bool:
        """Whether the device has ended the pass with this last epoch, and this peer was not late in its step.

        Without a device (kernels emulated on a CPU) whether the flag has risen.
        """
        if epoch == OPEN_EPOCH:
            return self.link.is_open()
        if self._lane.device.type != "cuda":
            return int(ctypes.c_uint64.from_address(self.link.inbox.flag).value) >= epoch
        has_come = self._lane.done_epoch >= epoch if self.has_come is None else self.has_come()
        # NOTE: in this order. A wait that gives up says so before its pass ends, and may do both between two looks.
        return has_come and self._lane.late_epoch(self.index) // LAYERS_PER_STEP != epoch // LAYERS_PER_STEP

    def take(self, layer: int, num_tokens: int, width: int) -> FloatArray:
        raise TypeError("rows of a device channel are read by kernels, not by the host")


class DeviceOutlet:
    """The producer's end. Kernels put; the host only keeps it."""

    def __init__(self, link: Link, ring: Callable[[], None]) -> None:
        self.link = link
        self.ring = ring

    def put(self, layer: int, epoch: int, payload: FloatArray) -> None:
        raise TypeError("rows of a device channel are written by kernels, not by the host")
