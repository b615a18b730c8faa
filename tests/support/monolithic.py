"""The undivided forward of a model: the same layers as the two workers', with no pool between them.

What split execution is compared with, bit for bit, and what is itself compared with transformers.
"""

from collections.abc import Iterator, Sequence
from itertools import count, pairwise

import numpy as np

from crosspool.backends.base import FloatArray
from crosspool.backends.numpy.attention_step import AttentionStep
from crosspool.backends.numpy.ffn_worker import FFNHalf
from crosspool.backends.numpy.kv_worker import NumpyAttentionWorker
from crosspool.core import SampledToken, SamplingParams
from crosspool.kv_pool.geometry import page_geometry
from crosspool.models.directory import ModelDirectory
from crosspool.models.spec import ModelSpec
from crosspool.scheduler.step import NewSequence, Phase, StepDescriptor, StepHeader, StepRow
from crosspool.units import ceil_div
from crosspool.weights_pool.loader import ModelWeights, load_attention_weights, load_ffn_weights

FRAME_BYTES = 1 << 20


class MonolithicModel:
    """One model in one thread. `ffn` holds its weights slices: their outputs are added in order, as the pools do."""

    def __init__(
        self,
        spec: ModelSpec,
        attention: ModelWeights,
        ffn: Sequence[ModelWeights],
        *,
        page_tokens: int = 16,
        num_frames: int = 64,
        frame_bytes: int = FRAME_BYTES,
    ) -> None:
        self.spec = spec
        self._geometry = page_geometry(
            spec, page_tokens=page_tokens, frame_bytes=frame_bytes, kv_dtype="float32", model=spec.family
        )
        self._num_frames = num_frames
        self._worker = NumpyAttentionWorker(num_frames, frame_bytes)
        self._worker.add_weights(spec.family, spec, attention.model, attention.layers, page_tokens)
        self._ffn = [FFNHalf(spec, weights.layers) for weights in ffn]
        self._sequence_ids = count()

    @classmethod
    def load(cls, directory: ModelDirectory, num_slices: int = 1, *, page_tokens: int = 16) -> "MonolithicModel":
        """The model of a directory, its FFN cut into `num_slices` as over that many weights ranks."""
        slices = [load_ffn_weights(directory, idx, num_slices) for idx in range(num_slices)]
        return cls(directory.spec, load_attention_weights(directory), slices, page_tokens=page_tokens)

    def run(self, step: StepDescriptor) -> tuple[SampledToken, ...]:
        """Run one step as the two workers would; its header's model name is not looked at."""
        attention = self._begin(step)
        for _ in self._layers(attention):
            pass
        return attention.finish()

    def generate(self, prompt: Sequence[int], sampling: SamplingParams, chunk: int | None = None) -> list[int]:
        """The tokens that `sampling` gives after `prompt`, which is prefilled in chunks of `chunk` tokens."""
        sequence = self._start(prompt, sampling)
        output: list[int] = []
        for step in self._steps(sequence, len(prompt), chunk, sampling.max_tokens):
            for sampled in self.run(step):
                output.append(sampled.token_id)
            if output and output[-1] in sampling.stop_token_ids:
                break
        self._worker.forget([sequence.sequence_id])
        return output

    def trace(self, prompt: Sequence[int], chunk: int | None = None) -> tuple[list[FloatArray], FloatArray]:
        """Every layer's output, each (len(prompt), hidden), and the logits (len(prompt), vocabulary)."""
        sequence = self._start(prompt, SamplingParams(max_tokens=1))
        chunks: list[list[FloatArray]] = []
        logits = []
        for step in self._steps(sequence, len(prompt), chunk, 1):
            attention = self._begin(step)
            chunks.append([hidden.copy() for hidden in self._layers(attention)])
            logits.append(attention.half.logits(attention.hidden))
            attention.finish()
        self._worker.forget([sequence.sequence_id])
        return [np.concatenate(parts) for parts in zip(*chunks, strict=True)], np.concatenate(logits)

    def _begin(self, step: StepDescriptor) -> AttentionStep:
        return self._worker.begin(step, self.spec.family)

    def _layers(self, attention: AttentionStep) -> Iterator[FloatArray]:
        """Run the layers; yields the residual stream after each."""
        for layer in range(self.spec.num_layers):
            rows = attention.attend(layer)
            attention.add([ffn(layer, rows) for ffn in self._ffn])
            yield attention.hidden

    def _start(self, prompt: Sequence[int], sampling: SamplingParams) -> NewSequence:
        return NewSequence(
            sequence_id=next(self._sequence_ids),
            prompt_token_ids=tuple(prompt),
            output_token_ids=(),
            sampling=sampling,
        )

    def _steps(
        self, sequence: NewSequence, num_prompt_tokens: int, chunk: int | None, max_tokens: int
    ) -> Iterator[StepDescriptor]:
        """Prefill chunks, then decode steps, of one sequence that has the arena to itself."""
        num_pages = self._geometry.num_pages(num_prompt_tokens + max_tokens)
        frames_per_page = self._geometry.frames_per_page
        needed = num_pages * frames_per_page + 1
        if needed > self._num_frames:
            raise ValueError(f"{num_pages} pages need {needed} frames; set num_frames >= {needed}")
        frames = iter(range(1, needed))
        pages = tuple(tuple(next(frames) for _ in range(frames_per_page)) for _ in range(num_pages))
        chunk = chunk or num_prompt_tokens
        bounds = [min(idx * chunk, num_prompt_tokens) for idx in range(ceil_div(num_prompt_tokens, chunk) + 1)]
        for start, stop in pairwise(bounds):
            row = StepRow(
                sequence_id=sequence.sequence_id,
                token_ids=sequence.prompt_token_ids[start:stop],
                num_cached_tokens=start,
                num_new_tokens=stop - start,
                new_pages=pages if start == 0 else (),
                sample=stop == num_prompt_tokens,
            )
            yield self._step(row, (sequence,) if start == 0 else ())
        for position in range(num_prompt_tokens, num_prompt_tokens + max_tokens - 1):
            row = StepRow(
                sequence_id=sequence.sequence_id, token_ids=None, num_cached_tokens=position, num_new_tokens=1
            )
            yield self._step(row, ())

    def _step(self, row: StepRow, joining: tuple[NewSequence, ...]) -> StepDescriptor:
        phase: Phase = "decode" if row.token_ids is None else "prefill"
        header = StepHeader(lane=0, model=self.spec.family, step_seq=1, phase=phase, num_tokens=row.num_new_tokens)
        return StepDescriptor(header=header, rows=(row,), joining=joining)
