"""A chunk of prompts on the KV rank: attention piece by piece, crossings, and the tokens of rows that end here."""

from collections.abc import Callable, Iterator

import torch

from crosspool.backends.cuda.chunks.chunk_crossing import ChunkCrossing
from crosspool.backends.cuda.chunks.chunk_half import ChunkHalf
from crosspool.backends.cuda.chunks.chunk_plan import ChunkPlan
from crosspool.backends.cuda.chunks.chunk_run import NO_CROSSING
from crosspool.backends.cuda.device.device_memory import pinned
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.device.uploads import upload_all
from crosspool.backends.cuda.kernels.sampling import Sampler, fill_sampling, sampling_records
from crosspool.backends.cuda.steps.batch import Batch
from crosspool.backends.cuda.steps.outcome import Outcome
from crosspool.backends.cuda.steps.records import SAMPLING_WORDS


def kv_chunk(
    kernels: Launcher,
    make_half: Callable[[], ChunkHalf],
    crossing: ChunkCrossing,
    plan: ChunkPlan,
    batch: Batch,
    outcome: Outcome,
) -> Iterator[int]:
    """Enqueue the chunk's kernels on torch's current stream; yields each crossing's number before its wait.

    The first layer waits for none, and lets others be served before each of its pieces.
    """
    half = make_half()
    half.embed()
    for layer in range(plan.num_layers):
        for piece in plan.pieces:
            if layer == 0:
                yield NO_CROSSING
            else:
                yield plan.crossing(layer - 1, piece)
                crossing.wait(layer - 1, piece)
                half.add(layer - 1, piece, crossing.received(layer - 1, piece, torch.float32))
            crossing.put(layer, piece, half.attend(layer, piece))
    last = plan.num_layers - 1
    for piece in plan.pieces:
        yield plan.crossing(last, piece)
        crossing.wait(last, piece)
        half.add(last, piece, crossing.received(last, piece, torch.float32))
    crossing.clear_words()
    if batch.sampled:
        logits = half.logits([row.token for row in batch.sampled])
        sample_rows(kernels, logits, batch, outcome)


def sample_rows(kernels: Launcher, logits: torch.Tensor, batch: Batch, outcome: Outcome) -> None:
    """Tokens of the rows that end here, from their logits, and both to where the host finds them after the chunk."""
    sampled = batch.sampled
    records = sampling_records(len(sampled))
    for row in batch.drawn:
        fill_sampling(records, sampled.index(row), batch.sampling_row(row))
    sampler = Sampler(kernels, len(sampled), logits.shape[1], logits.device)
    (words,) = upload_all([records.view("<i4").reshape(len(sampled), SAMPLING_WORDS)], logits.device)
    sampler.rows.copy_(words)
    tokens = pinned((len(sampled),), torch.int32, logits.device)
    tokens.copy_(sampler(logits), non_blocking=True)
    outcome.expect_tokens(sampled, tokens, logits)
