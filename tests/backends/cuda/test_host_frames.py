"""Host frames of a KV rank on a GPU: what copies leave, whatever the copy engine does first, and who waits for them."""

from __future__ import annotations

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.channels.link import Site  # noqa: E402
from crosspool.backends.cuda.device.driver import Driver  # noqa: E402
from crosspool.backends.cuda.kv_frames import host_frames as host_frames_module  # noqa: E402
from crosspool.backends.cuda.kv_frames.copy_order import MAX_COPIES  # noqa: E402
from crosspool.backends.cuda.kv_frames.host_frames import MAX_ENQUEUED, HostFrames, host_memory, make_host_frames  # noqa: E402
from crosspool.backends.numpy.host_frames import HostFrames as ReferenceFrames  # noqa: E402
from crosspool.kv_pool.host_tier import FrameCopy  # noqa: E402
from crosspool.scheduler.step import StepDescriptor, StepHeader, StepRow  # noqa: E402
from crosspool.units import KiB, MiB  # noqa: E402
from tests.backends.cuda.lazy_engine import LazyEngine  # noqa: E402

pytestmark = pytest.mark.judge

FRAME_BYTES, NUM_FRAMES, NUM_HOST_FRAMES, FIRST_FRAME = 64, 24, 32, 100


def host_frames(arena, *engines):
    host = np.zeros((NUM_HOST_FRAMES, FRAME_BYTES), dtype=np.uint8)
    return HostFrames(arena, host, host.ctypes.data, NUM_HOST_FRAMES, FIRST_FRAME, engines), host


def random_copy(rng):
    width = rng.randint(1, 3)
    frames = tuple(FIRST_FRAME + frame for frame in rng.sample(range(NUM_FRAMES), width))
    return FrameCopy(frames, tuple(rng.sample(range(NUM_HOST_FRAMES), width)), is_stowed=rng.random() < 0.5)


def step_that_brings(*pages):
    header = StepHeader(lane=0, model="m", step_seq=1, phase="decode", num_tokens=1)
    row = StepRow(sequence_id=0, token_ids=None, num_cached_tokens=3, num_new_tokens=1, new_pages=pages)
    return StepDescriptor(header=header, rows=(row,))


@pytest.mark.parametrize("seed", range(20))
def test_copies_leave_what_they_leave_one_by_one(seed):
    rng, contents = random.Random(seed), np.random.default_rng(seed)
    arena = torch.from_numpy(contents.integers(256, size=(NUM_FRAMES, FRAME_BYTES), dtype=np.uint8))
    engines, expected = (LazyEngine(seed), LazyEngine(seed + 100)), arena.numpy().copy()
    frames, host = host_frames(arena, *engines)
    reference = ReferenceFrames(expected, NUM_HOST_FRAMES, FIRST_FRAME)
    for _ in range(30):
        copies = tuple(random_copy(rng) for _ in range(rng.randint(1, 8)))
        frames.copy(copies)
        reference.copy(copies)
        if rng.random() < 0.5:
            rng.choice(engines).go_on()
    while frames.num_under_way:
        rng.choice(engines).go_on()
    np.testing.assert_array_equal(arena.numpy(), expected)
    np.testing.assert_array_equal(host, reference._host)


def test_a_long_message_is_enqueued_in_parts_as_the_device_goes_on():
    """So that the thread that runs decode steps is never away for long."""
    width, num_frames = 12, 12 * 40
    arena, engine = torch.zeros((num_frames, FRAME_BYTES), dtype=torch.uint8), LazyEngine()
    host = np.zeros((num_frames, FRAME_BYTES), dtype=np.uint8)
    frames = HostFrames(arena, host, host.ctypes.data, num_frames, 0, (LazyEngine(), engine))
    pages = [tuple(range(first, first + width)) for first in range(0, num_frames, width)]
    frames.copy([FrameCopy(page, page, is_stowed=True) for page in pages])
    assert engine.num_enqueued == 1
    wait, sizes = frames.before(step_that_brings(pages[-1])), []
    while not wait.satisfied():
        sizes.append(engine.num_enqueued - engine.num_ended)
        engine.go_on()
    assert max(sizes) == MAX_ENQUEUED
    assert engine.num_enqueued == -(-num_frames // (MAX_COPIES // width * width))
    assert frames.before(step_that_brings(*pages)) is None


def test_a_step_waits_for_the_frames_that_it_brings_and_for_no_others():
    inwards, outwards = LazyEngine(), LazyEngine()
    frames, _ = host_frames(torch.zeros((NUM_FRAMES, FRAME_BYTES), dtype=torch.uint8), inwards, outwards)
    assert frames.before(step_that_brings((101, 102))) is None
    frames.copy((FrameCopy((101, 102), (1, 2), is_stowed=True),))
    frames.copy((FrameCopy((103, 104), (3, 4), is_stowed=False),))
    first, second = (frames.before(step_that_brings(page)) for page in ((102, 105), (103, 104)))
    assert frames.before(step_that_brings()) is None
    assert frames.before(step_that_brings((105, 106), (9, 10))) is None, "nobody copies these"
    assert not first.satisfied()
    outwards.go_on()
    assert first.satisfied()
    assert not second.satisfied()
    assert frames.before(step_that_brings((101, 102))) is None
    inwards.go_on()
    assert second.satisfied()


def test_frames_of_a_step_without_a_part_here_are_waited_for_by_every_later_share():
    outwards = LazyEngine()
    frames, _ = host_frames(torch.zeros((NUM_FRAMES, FRAME_BYTES), dtype=torch.uint8), LazyEngine(), outwards)
    frames.copy((FrameCopy((101, 102), (1, 2), is_stowed=True),))
    frames.pass_over(step_that_brings((105, 106)))
    assert frames.before(step_that_brings(), is_share=True) is None, "nobody copies these"
    frames.pass_over(step_that_brings((102, 103)))
    waits = [frames.before(step_that_brings(), is_share=True) for _ in range(2)]
    assert frames.before(step_that_brings()) is None, "a step that is led here has brought its own"
    assert not any(wait.satisfied() for wait in waits)
    outwards.go_on()
    assert all(wait.satisfied() for wait in waits)
    frames.copy((FrameCopy((107,), (3,), is_stowed=True),))
    assert frames.before(step_that_brings(), is_share=True) is None


def test_a_frame_that_is_copied_again_is_waited_for_again():
    inwards, outwards = LazyEngine(), LazyEngine()
    frames, _ = host_frames(torch.zeros((NUM_FRAMES, FRAME_BYTES), dtype=torch.uint8), inwards, outwards)
    frames.copy((FrameCopy((101,), (1,), is_stowed=True), FrameCopy((101,), (2,), is_stowed=False)))
    wait = frames.before(step_that_brings((101,)))
    assert inwards.num_enqueued == 0, "the frame is being read"
    outwards.go_on()
    assert not wait.satisfied()
    inwards.go_on()
    assert wait.satisfied()


def test_no_frame_is_filled_while_passes_that_were_given_up_may_write_to_it():
    arena, engines, has_ended = (
        torch.zeros(NUM_FRAMES, FRAME_BYTES, dtype=torch.uint8),
        (LazyEngine(), LazyEngine()),
        [],
    )
    frames, host = host_frames(arena, *engines)
    host[5] = 7
    frames.bring_back_once(lambda: bool(has_ended))
    frames.copy(
        [FrameCopy((FIRST_FRAME + 3,), (5,), is_stowed=False), FrameCopy((FIRST_FRAME + 9,), (8,), is_stowed=True)]
    )
    wait = frames.before(step_that_brings((FIRST_FRAME + 3,)))
    for engine in engines:
        engine.go_on()
    assert not wait.satisfied()
    assert not arena[3].any()
    assert frames.before(step_that_brings((FIRST_FRAME + 9,))) is None, "what only reads frames does not wait"
    has_ended.append(True)
    assert not wait.satisfied()
    engines[0].go_on()
    assert wait.satisfied()
    assert bool((arena[3] == 7).all())


def test_host_memory_is_unpinned_with_its_frames_and_its_lack_is_told_with_the_size(monkeypatch):
    closed = []
    monkeypatch.setattr(host_frames_module, "DeviceCopyEngine", lambda driver, device: LazyEngine())
    monkeypatch.setattr(host_frames_module.HostBlob, "close", lambda blob: closed.append(blob.num_bytes))
    site = Site("kv0", torch.device("cpu"), Driver("kv0"), {"kv0": 0}, None)
    arena = torch.zeros((4, 2 * MiB), dtype=torch.uint8)
    frames = make_host_frames(site, arena, 3, 0)
    assert frames.num_bytes == 6 * MiB
    assert not closed
    del frames
    assert closed == [6 * MiB]

    def too_much(site, sizes):
        raise OSError(f"no {sum(sizes.values())} bytes")

    monkeypatch.setattr(host_frames_module, "HostBlob", too_much)
    with pytest.raises(ValueError, match=r"kv0: host_pool_bytes asks for 2\.0 GiB of pinned memory: no 2147.*lower it"):
        make_host_frames(site, arena, 1024, 0)


@pytest.mark.parametrize(("num_frames", "frame_bytes"), [(3, 2 * MiB), (100, 2 * MiB), (9, 24 * KiB), (60, 3 * MiB)])
def test_host_frames_lie_side_by_side_and_each_in_one_pinned_part(num_frames, frame_bytes, monkeypatch):
    monkeypatch.setattr(host_frames_module, "PART_BYTES", 64 * MiB)
    blob = host_memory(Site("kv0", torch.device("cpu"), Driver("kv0"), {"kv0": 0}, None), num_frames, frame_bytes)
    assert blob.num_bytes >= num_frames * frame_bytes
    assert len(blob.groups) == -(-num_frames * frame_bytes // blob.groups[0].stop)
    for first, group in blob.groups.items():
        assert group.start == first * frame_bytes
