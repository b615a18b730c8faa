"""The prefill rank's side of a chunk: both halves on one device, KV from the home and back to it layer by layer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from crosspool.backends.cuda.chunks.chunk_ffn import ChunkFFN
from crosspool.backends.cuda.chunks.chunk_half import ChunkHalf
from crosspool.backends.cuda.chunks.chunk_run import NO_CROSSING
from crosspool.backends.cuda.prefill_rank.handed_plan import HandedPlan
from crosspool.backends.cuda.prefill_rank.handed_slots import HandedCrossing, SlotPlaces
from crosspool.backends.cuda.prefill_rank.swap import InPlace


@dataclass(frozen=True)
class Prompt:
    """Both halves of a chunk on the device, and the places of its new slots and of its earlier ones."""

    half: ChunkHalf
    ffn: ChunkFFN
    new: SlotPlaces
    earlier: SlotPlaces


def handed_chunk(
    in_place: InPlace,
    make: Callable[[], Prompt],
    crossing: HandedCrossing,
    plan: HandedPlan,
    sampled: Sequence[int],
) -> Iterator[int]:
    """Enqueue the chunk's kernels on torch's current stream; yields each crossing's number before its wait.

    make: called with torch's stream set. sampled: tokens of the step whose rows the home samples from.
    """
    prompt = make()
    half, ffn, new, earlier = prompt.half, prompt.ffn, prompt.new, prompt.earlier
    in_place.await_own()
    half.embed()
    pieces, last_part = plan.chunk.pieces, len(plan.parts) - 1
    rows = max(piece.num_tokens for piece in pieces)
    sums = torch.empty(rows, half.spec.hidden_size, dtype=torch.float32, device=half.residual.device)
    for number in range(plan.last):
        layer, part = plan.place(number)
        yield number
        crossing.wait(number)
        crossing.take_slots(number, half.cache, 0, earlier.part(*plan.parts[part]))
        if part < last_part:
            crossing.tell(number)
            continue
        in_place.await_layer(layer)
        for piece in pieces:
            if piece.index:
                yield NO_CROSSING
            half.attend(layer, piece)
            if piece is pieces[-1]:
                crossing.give_slots(number, half.cache, 0, new)
            out = sums[: piece.num_tokens]
            ffn.run(layer, half.padded(piece), out)
            half.add(layer, piece, [out])
    yield plan.last
    crossing.wait(plan.last)
    if sampled:
        crossing.give_rows(plan.last, half.rows(sampled))
    else:
        crossing.tell(plan.last)
