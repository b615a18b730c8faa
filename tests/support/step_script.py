"""Random but valid step sequences of several sequences of one model: chunked prefill, decode, sequences coming late."""

from collections.abc import Iterator

import numpy as np

from crosspool.core import SamplingParams
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.scheduler.step import NewSequence, StepDescriptor, StepHeader, StepRow
from crosspool.units import ceil_div


class Script:
    """The engine's side of the worker contract, without an engine: hands out pages, joins sequences, counts tokens.

    Every sequence of `prompts` is prefilled in random chunks and decoded for `num_output` tokens. Pages are sent with
    the row that first needs them.
    """

    def __init__(
        self,
        model: str,
        geometry: PageGeometry,
        prompts: list[list[int]],
        sampling: list[SamplingParams],
        *,
        num_output: int,
        num_frames: int,
        seed: int,
    ) -> None:
        self._model = model
        self._geometry = geometry
        self._prompts = prompts
        self._sampling = sampling
        self._num_output = num_output
        self._rng = np.random.default_rng(seed)
        self._free = self._rng.permutation(np.arange(1, num_frames)).tolist()
        self._cached = [0] * len(prompts)
        self._pages = [0] * len(prompts)
        self._step_seq = 0

    def steps(self) -> Iterator[StepDescriptor]:
        lengths = [len(prompt) + self._num_output - 1 for prompt in self._prompts]
        while True:
            open_ = [idx for idx in range(len(lengths)) if self._cached[idx] < lengths[idx]]
            if not open_:
                return
            prefilling = [idx for idx in open_ if self._cached[idx] < len(self._prompts[idx])]
            decoding = [idx for idx in open_ if idx not in prefilling]
            if prefilling and (not decoding or self._rng.random() < 0.5):
                chosen = self._some(prefilling)
                yield self._step("prefill", chosen)
            else:
                yield self._step("decode", self._some(decoding))

    def _some(self, sequences: list[int]) -> list[int]:
        count = int(self._rng.integers(1, len(sequences) + 1))
        return self._rng.permutation(sequences)[:count].tolist()

    def _step(self, phase, sequences: list[int]) -> StepDescriptor:
        joining = tuple(
            NewSequence(
                sequence_id=idx,
                prompt_token_ids=tuple(self._prompts[idx]),
                output_token_ids=(),
                sampling=self._sampling[idx],
            )
            for idx in sequences
            if self._cached[idx] == 0
        )
        rows = tuple(self._row(phase, idx) for idx in sequences)
        self._step_seq += 10  # room for replays
        header = StepHeader(
            lane=0,
            model=self._model,
            step_seq=self._step_seq,
            phase=phase,
            num_tokens=sum(row.num_new_tokens for row in rows),
        )
        return StepDescriptor(header=header, rows=rows, joining=joining)

    def _row(self, phase, idx: int) -> StepRow:
        start, prompt = self._cached[idx], self._prompts[idx]
        count = 1 if phase == "decode" else int(self._rng.integers(1, len(prompt) - start + 1))
        first_new_page = self._pages[idx]
        num_pages = ceil_div(start + count, self._geometry.page_tokens) - first_new_page
        new_pages = tuple(
            tuple(self._free.pop() for _ in range(self._geometry.frames_per_page)) for _ in range(num_pages)
        )
        self._pages[idx] += num_pages
        self._cached[idx] += count
        return StepRow(
            sequence_id=idx,
            token_ids=None if phase == "decode" else tuple(prompt[start : start + count]),
            num_cached_tokens=start,
            num_new_tokens=count,
            first_new_page=first_new_page,
            new_pages=new_pages,
            sample=start + count >= len(prompt),
        )
