"""Pages that other sequences filled, that are mapped, or that were in host memory, through the CUDA workers."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from crosspool.backends.base import LaneLinks  # noqa: E402
from crosspool.backends.cuda.kv_frames.frames import DeviceFrames  # noqa: E402
from crosspool.backends.cuda.kv_frames.host_frames import HostFrames  # noqa: E402
from crosspool.backends.numpy.host_vmm import HostVmmDriver  # noqa: E402
from crosspool.kv_pool.ahead import MappingHint  # noqa: E402
from crosspool.kv_pool.backing.mapped_frames import MappedFrames  # noqa: E402
from crosspool.kv_pool.host_tier import FrameCopy  # noqa: E402
from tests.backends.cuda.decoding import FRAME_BYTES  # noqa: E402
from tests.backends.cuda.lazy_engine import LazyEngine  # noqa: E402
from tests.backends.cuda.worker_pair import (  # noqa: E402
    CPU,
    NUM_FRAMES,
    Pair,
    arena,
    decode_step,
    generate,
    greedy,
    pages,
    prefill_step,
    prompt_of,
)
from tests.support.awaited import until  # noqa: E402

pytestmark = [pytest.mark.judge, pytest.mark.triton]


def test_a_sequence_may_begin_behind_pages_that_another_one_filled(directory):
    """The prefix cache: two full pages are the other's, the step starts at their end, and both go on rightly."""
    first = prompt_of(directory, 21)
    second = [*first[:16], *prompt_of(directory, 5, seed=1)]
    expected = {1: generate(Pair(directory), directory, first, 3, greedy())}
    expected[2] = generate(Pair(directory), directory, second, 3, greedy())
    pair = Pair(directory)
    found = {1: [pair.run(prefill_step(directory, first, 1, greedy(), num_pages=4))[0].token_id]}
    width = len(pages(directory, 1)[0])
    whole = prefill_step(directory, second, 2, greedy(), 2)
    shared = (*pages(directory, 2), *pages(directory, 2, first=1 + 4 * width))
    row = whole.rows[0]._replace(token_ids=tuple(second[16:]), num_cached_tokens=16, num_new_tokens=5, new_pages=shared)
    step = replace(whole, header=whole.header._replace(num_tokens=5), rows=(row,))
    found[2] = [pair.run(step)[0].token_id]
    for turn in range(2):
        for token in pair.run(decode_step(dict.fromkeys(found, 21 + turn), turn + 3)):
            found[token.sequence_id].append(token.token_id)
    assert found == expected


class Mapped:
    """A pair on frames that are mapped for each model."""

    def __init__(self, directory) -> None:
        self.mapped = MappedFrames(HostVmmDriver(), NUM_FRAMES, FRAME_BYTES, 4096)
        self.frames = DeviceFrames(self.mapped, FRAME_BYTES, CPU)
        self.pair = Pair(directory, frames=self.frames)


def test_mapped_frames_give_the_tokens_of_an_arena(directory):
    """Also once pages lie where others lay before."""
    prompts = [prompt_of(directory, 21, seed) for seed in range(2)]
    expected = [generate(Pair(directory), directory, prompt, 4, greedy()) for prompt in prompts]
    mapped = Mapped(directory)
    assert generate(mapped.pair, directory, prompts[0], 4, greedy()) == expected[0]
    held = mapped.frames.counts().mapped_frames
    mapped.pair.kv.forget([1])
    mapped.frames.hint([MappingHint(model="tiny", given_back=pages(directory, 8))])
    until(lambda: mapped.frames.counts().mapped_frames == 0)
    step = prefill_step(directory, prompts[1], 5, greedy(), 2)
    (row,) = step.rows
    flipped = tuple(reversed(row.new_pages))
    found = [mapped.pair.run(replace(step, rows=(row._replace(new_pages=flipped),)))[0].token_id]
    for idx in range(3):
        found += [token.token_id for token in mapped.pair.run(decode_step({2: 21 + idx}, idx + 6))]
    assert found == expected[1]
    counts = mapped.frames.counts()
    assert counts.unmaps == 8
    assert counts.mapped_frames == held
    mapped.pair.kv.remove_model("tiny")
    mapped.mapped.close()


def test_pages_of_a_step_that_was_given_up_stay_until_its_lane_is_drained(directory):
    prompt = prompt_of(directory, 5)
    mapped = Mapped(directory)
    mapped.pair.run(prefill_step(directory, prompt, 1, greedy(), num_pages=1))
    held = mapped.frames.counts().mapped_frames
    assert mapped.pair.run(decode_step({1: len(prompt)}, 2), max_segments=5) is None
    mapped.pair.kv.forget([1])
    mapped.frames.hint([MappingHint(model="tiny", given_back=pages(directory, 1))])
    time.sleep(0.05)
    assert mapped.frames.counts().mapped_frames == held
    for worker_lane in (mapped.pair.kv._lanes[0], mapped.pair.ffn["w0"]._lanes[0]):
        worker_lane.memory._last_epoch = 0  # now the device has ended it
    mapped.frames.hint([])
    until(lambda: mapped.frames.counts().mapped_frames == 0)
    mapped.pair.kv.remove_model("tiny")
    mapped.mapped.close()


def test_frames_that_cannot_be_mapped_name_the_size():
    with pytest.raises(ValueError, match="frame_bytes is 6000; with kv_backing vmm it must be a multiple of 4096"):
        MappedFrames(HostVmmDriver(), 4, 6000, 4096)


def test_a_sequence_may_begin_behind_pages_that_were_in_host_memory(directory):
    """Others had their frames meanwhile. A step that brings the new ones begins once they are filled."""
    prompt, width = prompt_of(directory, 21), len(pages(directory, 1)[0])
    expected = generate(Pair(directory), directory, prompt, 3, greedy())
    frames, inwards, outwards = arena(), LazyEngine(), LazyEngine()
    host = np.zeros((NUM_FRAMES, FRAME_BYTES), dtype=np.uint8)
    tier = HostFrames(frames.arena, host, host.ctypes.data, NUM_FRAMES, 0, (inwards, outwards))
    pair = Pair(directory, frames=frames, host_frames=tier)
    assert pair.kv.memory_bytes()["host_kv_cache"] == NUM_FRAMES * FRAME_BYTES
    pair.run(prefill_step(directory, prompt, 1, greedy(), num_pages=4))
    tier.copy([FrameCopy(page, page, is_stowed=True) for page in pages(directory, 2)])
    pair.kv.forget([1])
    other = prefill_step(directory, prompt_of(directory, 21, seed=1), 2, greedy(), 2, num_pages=4)
    assert not begun(pair, other).satisfied(), "its frames are being read"
    outwards.go_on()
    pair.run(other)

    new = pages(directory, 2, first=1 + 4 * width)
    moves = zip(new, pages(directory, 2), strict=True)
    tier.copy([FrameCopy(page, stowed, is_stowed=False) for page, stowed in moves])
    (token,) = pair.run(decode_step({2: 21}, 3))
    assert token.sequence_id == 2, "a step that brings other frames, or none, waits for nothing"
    whole = prefill_step(directory, prompt, 4, greedy(), 3)
    brought = (*new, *pages(directory, 2, first=1 + 6 * width))
    row = whole.rows[0]._replace(
        token_ids=tuple(prompt[16:]), num_cached_tokens=16, num_new_tokens=5, new_pages=brought
    )
    step = replace(whole, header=whole.header._replace(num_tokens=5), rows=(row,))
    assert not begun(pair, step).satisfied(), "its pages are not filled yet"
    inwards.go_on()
    found = [pair.run(step)[0].token_id]
    for turn in range(2):
        found += [token.token_id for token in pair.run(decode_step({3: 21 + turn}, turn + 5))]
    assert found == expected


def begun(pair, step):
    """What the KV rank's half of a step waits for first; it is given up then."""
    half = pair.kv.run(step, LaneLinks(pair.outlets, pair.inlets))
    wait = next(half)
    half.close()
    return wait
