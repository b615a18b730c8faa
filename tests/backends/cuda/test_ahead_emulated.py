"""Steps that devices get while they are at the one before: the same tokens, whoever comes first, and early ends."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from benchmarks.ranks.driven import RANKS, DrivenRanks  # noqa: E402
from crosspool.cluster import messages  # noqa: E402
from crosspool.models.directory import read_model_dir  # noqa: E402
from crosspool.units import MiB  # noqa: E402
from crosspool.weights_pool.loader import load_attention_weights, load_ffn_weights  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402
from tests.backends.cuda.fake_device import use_fake_devices  # noqa: E402
from tests.backends.cuda.numpy_weights import attention_weights_from_numpy, ffn_weights_from_numpy  # noqa: E402
from tests.support.tiny_models import write_tiny_model  # noqa: E402

pytestmark = [pytest.mark.judge, pytest.mark.triton]

CPU = torch.device("cpu")
CONTEXT, COUNT = 3, 13


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "tiny"
    directory = read_model_dir(write_tiny_model(path, "qwen3_moe", dtype="bfloat16", tokenizer=False))
    spec = directory.spec
    attention = attention_weights_from_numpy(spec, load_attention_weights(directory), CPU)
    return spec, attention, ffn_weights_from_numpy(spec, load_ffn_weights(directory, 0, 1), CPU)


class Rig:
    """Both ranks of a model, their hosts and devices in turn; `seed`: who goes on more often."""

    def __init__(self, model, monkeypatch, seed=0, *, goes_ahead=True) -> None:
        monkeypatch.setattr("benchmarks.ranks.driven.STEP_DEADLINE_S", 120.0)  # kernels may be compiled first
        self.streams = use_fake_devices(monkeypatch)
        self.random = random.Random(seed)
        self.device_share = self.random.choice((0.3, 0.7, 0.95))
        arena = torch.zeros(48, 2 * MiB, dtype=torch.uint8)
        kernels = EmulatedKernels()
        self.ranks = DrivenRanks(
            (kernels, kernels), (CPU, CPU), *model, arena, "graphs", ahead=RANKS if goes_ahead else ()
        )
        self.num_ahead = 0
        for loop in self.ranks._loops:
            begin, steps = loop._steps._begin_ahead, loop._steps
            steps._begin_ahead = lambda lane, steps=steps, begin=begin: self.counted(steps, lane, begin)
        plain = self.ranks.turn
        self.ranks.turn = lambda: self.devices_go_on() if self.random.random() < self.device_share else plain()

    def counted(self, steps, lane, begin):
        begin(lane)
        self.num_ahead += (behind := steps._behind.get(lane)) is not None and behind.run is not None

    def devices_go_on(self):
        self.random.choice(self.streams).go_on() if self.streams else None

    def finish(self, *steps):
        """The tokens of each of these steps of lane 0, the second behind the first and so on, two at a time."""
        found, before = [], 0
        for number, step in enumerate(steps):
            self.ranks.submit(step, behind=before if number else 0)
            before = step.header.step_seq
            if number == 0 and len(steps) > 1:
                continue
            while len([1 for _, _, has_ended in found if has_ended]) < number + (number + 1 == len(steps)):
                self.ranks.turn()
                found += self.ranks.take()
        ended, tokens = [], []
        for _, token, has_ended in found:
            tokens.append(token)
            if has_ended:
                ended.append(tokens)
                tokens = []
        return ended

    def generate(self, num_steps, *, num_lanes=1, stop_ids=()):
        lanes = [(lane, self.ranks.sequence(CONTEXT, slot=lane, stop_ids=stop_ids)) for lane in range(num_lanes)]
        self.ranks.generate(lanes, COUNT, num_steps)
        return [sequence.tokens for _, sequence in lanes]


@pytest.fixture
def apart(model, monkeypatch):
    """The tokens of steps one by one."""
    with monkeypatch.context() as patch:
        return Rig(model, patch, goes_ahead=False).generate(1)[0]


@pytest.mark.parametrize(("num_steps", "seed"), [(1, 1), (4, 2), (4, 3), (6, 4)])
def test_tokens_are_those_of_steps_one_by_one(model, monkeypatch, apart, num_steps, seed):
    rig = Rig(model, monkeypatch, seed)
    rig.generate(num_steps)  # passes are captured
    before = rig.num_ahead
    assert rig.generate(num_steps) == [apart]
    assert rig.num_ahead > before
    assert len(apart) == COUNT


def test_two_lanes_do_not_mix(model, monkeypatch, apart):
    rig = Rig(model, monkeypatch, 5)
    rig.generate(4, num_lanes=2)
    assert rig.generate(4, num_lanes=2) == [apart, apart]


@pytest.mark.parametrize("last", [2, 4])
@pytest.mark.parametrize("seed", [6, 7])
def test_a_run_behind_one_that_ended_with_all_its_rows_does_not_begin(model, monkeypatch, apart, last, seed):
    """Whether the device had it already, and finds that by itself, or is told; the lane goes on with others."""
    rig = Rig(model, monkeypatch, seed)
    rig.generate(4)
    assert apart[last] not in apart[1:last]
    sequence = rig.ranks.sequence(CONTEXT, stop_ids=(apart[last],))
    rig.finish(rig.ranks.begin(0, sequence))
    begun, num_ahead = [stream.num_begun for stream in rig.streams], rig.num_ahead
    first, second = rig.finish(rig.ranks.decode(0, [sequence], 4), rig.ranks.decode(0, [sequence], 4))
    assert first == apart[1 : last + 1]
    assert len(second) == 1, "tokens that nobody wants"
    assert last == 2 or rig.num_ahead > num_ahead
    num_passes = [stream.num_begun - before for stream, before in zip(rig.streams, begun, strict=True)]
    assert num_passes == [last, last, 0, 0], "of both ranks, in lane 0 and in lane 1"
    assert rig.generate(4) == [apart]


def test_a_step_handed_over_ahead_is_given_up_with_the_one_before(model, monkeypatch, apart):
    rig = Rig(model, monkeypatch, 8)
    rig.generate(1)
    sequence = rig.ranks.sequence(CONTEXT)
    rig.finish(rig.ranks.begin(0, sequence))
    steps, num_ahead = [rig.ranks.decode(0, [sequence], 1) for _ in range(2)], rig.num_ahead
    for stream in rig.streams:
        stream.synchronize()
    rig.ranks.submit(steps[0])
    while rig.streams[0].is_idle:
        rig.ranks._loops[0].advance()
    rig.ranks.submit(steps[1], steps[0].header.step_seq)
    assert rig.num_ahead > num_ahead
    for loop in rig.ranks._loops:
        loop.handle(messages.AbortStep(0, steps[0].header.step_seq))
        loop.handle(messages.AbortStep(0, steps[1].header.step_seq))
    ended = [said.step_seq for said in rig.ranks.ended if isinstance(said, messages.StepEnded)]
    assert ended == [step.header.step_seq for step in steps]
    rig.ranks.ended.clear()
    assert rig.generate(1) == [apart], "the lane is free again"
