"""Whether a run begins, and after each step whether it goes on: decided on the device (`csrc/lane_steps.cu`)."""

from collections.abc import Sequence

import torch

from crosspool.backends.cuda.channels.transport_params import AdvanceParams, Flags, ReleaseParams
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.params import address
from crosspool.backends.cuda.steps.lane_memory import LaneMemory
from crosspool.backends.cuda.steps.records import RECORD_WORDS, RING_SLOTS, RUN_AT


def advance(
    kernels: Launcher,
    lane: LaneMemory,
    num_layers: int,
    flags: Sequence[int],
    *,
    rows: int = 0,
    tokens: torch.Tensor | None = None,
    again: int = 0,
    is_first: bool = False,
) -> None:
    """Let the next step of the run begin, or end the run. is_first: before its first step, instead of after one.

    The KV rank gives the step's `tokens` (rows) int32 and the addresses of its peers' flags, a weights rank that of the
    flag of its rows. again: the condition of the graph around the step; 0: none.
    """
    kernel = "open_run" if is_first else "advance"
    params = AdvanceParams(
        view=lane.view(),
        flags=Flags.at(flags),
        ring=address(lane.records.memory),
        tokens=address(tokens),
        host_tokens=address(lane.host_tokens),
        again=again,
        rows=rows,
        ring_slots=RING_SLOTS,
        record_words=RECORD_WORDS,
        run_at=RUN_AT,
        num_layers=num_layers,
    )
    kernels.launch("lane_steps", kernel, grid=(1, 1, 1), threads=32, smem_bytes=0, params=params, overlap=False)


def release(kernels: Launcher, flags: Sequence[int], epoch: int) -> None:
    """Raise the flags at these addresses, in peers' memory, to `epoch`, behind what is enqueued."""
    params = ReleaseParams(flags=Flags.at(flags), epoch=epoch)
    kernels.launch("lane_steps", "release", grid=(1, 1, 1), threads=32, smem_bytes=0, params=params, overlap=False)
