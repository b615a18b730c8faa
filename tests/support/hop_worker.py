"""A second process that answers hops over a channel: takes each payload, checks its sum, and puts it back changed.

Run as `python -m tests.support.hop_worker CONTROL_FD NUM_HOPS`.
"""

import os
import socket
import sys

import numpy as np

from crosspool.cluster.channel import ChannelInlet, ChannelOutlet, a2f_part, f2a_part
from crosspool.cluster.control import ControlSocket
from crosspool.cluster.messages import FromRank, MemoryReport, OpenChannels, ToRank


def payload(layer: int, epoch: int, size: int) -> np.ndarray:
    """(1, size) rows that differ in every hop; the last element is the sum of the others, modulo a prime."""
    row = ((np.arange(size) * 7 + epoch * 31 + layer) % 509).astype(np.float32)
    row[-1] = checksum(row)
    return row[None]


def checksum(row: np.ndarray) -> float:
    return float(int(row[:-1].sum()) % 4093)


def answer(row: np.ndarray) -> np.ndarray:
    """What the worker makes of a payload."""
    back = row[:, ::-1] + 1.0
    back[0, -1] = checksum(back[0])
    return back


def main(control_fd: int, num_hops: int) -> None:
    control: ControlSocket[ToRank, FromRank] = ControlSocket(socket.socket(fileno=control_fd))
    while not (messages := control.receive()):
        pass
    opened = messages[0][1]
    assert isinstance(opened, OpenChannels)
    memory = opened.region.map()
    inlet = ChannelInlet(a2f_part(memory, opened.capacity), opened.capacity)
    outlet = ChannelOutlet(f2a_part(memory, opened.capacity), opened.capacity, lambda: None)
    num_bad = 0
    for hop in range(num_hops):
        layer = hop % 3
        while not inlet.arrived(hop + 1):
            os.sched_yield()
        row = inlet.take(layer, 1, opened.capacity)
        num_bad += float(row[0, -1]) != checksum(row[0])
        outlet.put(layer, hop + 1, answer(row))
    control.send(("w0", MemoryReport({"bad": num_bad})))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
