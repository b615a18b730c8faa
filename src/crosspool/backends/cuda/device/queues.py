"""A device's queues: streams that share one wait for each other."""

import os

MAX_CONNECTIONS = 32
"""Queues of the device. With fewer than streams, two lanes share one, and a lane whose kernel waits for its peer there
holds up the other one, for which that peer may be waiting; a run that lies ready behind another does the same."""


def ask_for_queues() -> None:
    """Have this process use as many queues as there are; CUDA reads that when it starts."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(MAX_CONNECTIONS))
