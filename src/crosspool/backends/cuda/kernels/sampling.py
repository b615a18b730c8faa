"""Sampling on the device: the best token of each row, or one drawn by temperature, min-p, top-k and top-p.

The host computes each row's random number, so it is the one that the NumPy sampler takes at that position. What needs
more than a row's logits and these numbers (penalties, bias, log-probabilities) is sampled on the host: such rows, and
greedy ones, have a record of zeros.
"""

import struct

import numpy as np
import numpy.typing as npt
import torch

from crosspool.backends.cuda.channels.transport_params import ArgmaxParams, SampleParams
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.params import address, check
from crosspool.backends.cuda.steps.records import SAMPLING, SAMPLING_WORDS
from crosspool.backends.sequences.sampler import SamplingRow
from crosspool.units import ceil_div

_ARGMAX_VALUES = 2048
_SAMPLING = struct.Struct("<dddiI")
"""One SAMPLING, which numpy would take longer to write."""


def fill_sampling(record: npt.NDArray[np.void], index: int, row: SamplingRow) -> None:
    """Write how `row`, which is not greedy, is drawn to `record[index]`."""
    params = row.params
    random = round(row.uniform.at(row.position) * 2.0**32 - 0.5)
    drawn = (params.temperature, params.min_p, params.top_p, params.top_k, random)
    _SAMPLING.pack_into(record.data, index * SAMPLING.itemsize, *drawn)


class Sampler:
    """Tokens of a pass's rows; scratch for one (rows, vocabulary)."""

    def __init__(self, kernels: Launcher, rows: int, vocab: int, device: torch.device) -> None:
        self._kernels, self._vocab, self._parts = kernels, vocab, ceil_div(vocab, _ARGMAX_VALUES)
        self._best = torch.empty(rows * self._parts, dtype=torch.float32, device=device)
        self._best_ids = torch.empty(rows * self._parts, dtype=torch.int32, device=device)
        self._tickets = torch.zeros(rows, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.rows = torch.zeros(rows, SAMPLING_WORDS, dtype=torch.int32, device=device)  # each a SAMPLING

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """(rows) int32 from (rows, vocabulary) fp32; drawn rows' logits become weights, the result is reused."""
        check("logits", logits, (len(self.tokens), self._vocab), torch.float32)
        best = ArgmaxParams(
            logits=address(logits),
            best=address(self._best),
            best_ids=address(self._best_ids),
            tickets=address(self._tickets),
            tokens=address(self.tokens),
            vocab=self._vocab,
        )
        grid = (self._parts, len(self.tokens), 1)
        self._kernels.launch("transport", "argmax", grid=grid, threads=256, smem_bytes=128, params=best)
        drawn = SampleParams(
            logits=address(logits), rows=address(self.rows), tokens=address(self.tokens), vocab=self._vocab
        )
        self._kernels.launch(
            "sample", "sample_rows", grid=(len(self.tokens), 1, 1), threads=1024, smem_bytes=512, params=drawn
        )
        return self.tokens


def sampling_records(shape: int | tuple[int, ...]) -> npt.NDArray[np.void]:
    """SAMPLING of so many rows, or of that shape, all greedy."""
    return np.zeros(shape, dtype=SAMPLING)
