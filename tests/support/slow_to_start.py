"""A backend whose ranks take longer to start than any test waits, as where kernels are first compiled."""

import threading


def attention_worker(num_frames: int, frame_bytes: int) -> None:
    threading.Event().wait()


def ffn_worker(rank: str) -> None:
    threading.Event().wait()
