"""Steps of real models written out beforehand, for runs through a cluster and through the undivided model alike."""

from collections.abc import Iterator

from crosspool.core import SamplingParams
from crosspool.kv_pool.geometry import page_geometry
from crosspool.models.spec import ModelSpec
from crosspool.scheduler.step import NewSequence, StepDescriptor, StepHeader, StepRow

PAGE_TOKENS = 16
FRAME_BYTES = 1 << 20
NUM_FRAMES = 64
NUM_DECODE_STEPS = 4


def scripted_steps(
    spec: ModelSpec, model: str, lane: int, frames: Iterator[int], first_id: int, kv_rank: str = "kv0"
) -> list[StepDescriptor]:
    """Two sequences: a prefill in two chunks and a few decode steps. One is greedy, the other drawn from a seed."""
    geometry = page_geometry(
        spec, page_tokens=PAGE_TOKENS, frame_bytes=FRAME_BYTES, kv_dtype="float32", model=spec.family
    )
    prompts = [tuple((7 * lane + 3 * pos + 11) % 500 + 1 for pos in range(count)) for count in (13 + lane, 9)]
    new = [
        NewSequence(
            sequence_id=first_id + idx,
            prompt_token_ids=prompt,
            output_token_ids=(),
            sampling=SamplingParams(max_tokens=8, temperature=0.8 * idx, seed=lane + 5, num_logprobs=3),
        )
        for idx, prompt in enumerate(prompts)
    ]
    pages = [tuple(tuple(next(frames) for _ in range(geometry.frames_per_page)) for _ in range(2)) for _ in prompts]
    cuts = [len(prompt) // 2 for prompt in prompts]
    first = [
        StepRow(
            sequence_id=sequence.sequence_id,
            token_ids=prompt[:cut],
            num_cached_tokens=0,
            num_new_tokens=cut,
            new_pages=own,
            sample=False,
        )
        for sequence, prompt, cut, own in zip(new, prompts, cuts, pages, strict=True)
    ]
    second = [
        StepRow(
            sequence_id=sequence.sequence_id,
            token_ids=prompt[cut:],
            num_cached_tokens=cut,
            num_new_tokens=len(prompt) - cut,
        )
        for sequence, prompt, cut in zip(new, prompts, cuts, strict=True)
    ]
    decodes = [
        [
            StepRow(
                sequence_id=sequence.sequence_id,
                token_ids=None,
                num_cached_tokens=len(prompt) + turn,
                num_new_tokens=1,
            )
            for sequence, prompt in zip(new, prompts, strict=True)
        ]
        for turn in range(NUM_DECODE_STEPS)
    ]
    return [
        StepDescriptor(
            header=StepHeader(
                lane=lane,
                model=model,
                step_seq=number,
                phase="prefill" if number <= 2 else "decode",
                num_tokens=sum(row.num_new_tokens for row in rows),
                kv_rank=kv_rank,
            ),
            rows=tuple(rows),
            joining=tuple(new) if number == 1 else (),
        )
        for number, rows in enumerate([first, second, *decodes], 1)
    ]
