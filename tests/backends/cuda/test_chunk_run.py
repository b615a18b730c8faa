"""A chunk lets other lanes be served after each piece, and stays few pieces ahead of its device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")
from crosspool.backends.cuda.chunks import chunk_run  # noqa: E402
from crosspool.backends.cuda.chunks.chunk_plan import chunk_plan  # noqa: E402
from crosspool.backends.cuda.chunks.chunk_run import NO_CROSSING, PIECES_AHEAD, run_pieces  # noqa: E402

pytestmark = pytest.mark.judge


class FakeEvent:
    """An event of a device that ends nothing until it is told."""

    made: ClassVar[list[FakeEvent]] = []

    def __init__(self):
        self.is_over = False
        FakeEvent.made.append(self)

    def record(self, stream):
        pass

    def query(self):
        return self.is_over


@pytest.fixture
def begun(monkeypatch):
    """Marks of `begin_pass` and `end_pass`; events and streams are fakes."""
    FakeEvent.made = []
    marks = []
    monkeypatch.setattr(chunk_run, "_stream", lambda lane, is_shared, patience: None)
    monkeypatch.setattr(chunk_run, "begin_pass", lambda launcher, memory: marks.append("begin"))
    monkeypatch.setattr(chunk_run, "end_pass", lambda launcher, memory, count: marks.append("end"))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    return marks


def run_of(kernels):
    lane = SimpleNamespace(stream=object(), memory=SimpleNamespace(push=lambda base, count: None))
    inlet = SimpleNamespace(has_come=None)
    plan = chunk_plan(8192, 1, 2)
    return run_pieces(None, lane, (inlet,), plan, iter(kernels), lambda: True), inlet


def test_every_piece_is_followed_by_a_turn_of_others_from_the_first_on(begun):
    enqueued = []

    def kernels():
        for number in (NO_CROSSING, NO_CROSSING, 0, 1, 2, 3):
            enqueued.append(number)
            yield number

    run, inlet = run_of(kernels())
    for turn in range(PIECES_AHEAD):
        next(run)
        assert len(enqueued) == turn + 1, "several pieces were enqueued without a turn of others between"
        assert inlet.has_come(), "nothing is to be waited for yet"
    next(run)
    assert not inlet.has_come(), "the device has not ended the first piece"
    FakeEvent.made[0].is_over = True
    assert inlet.has_come()
    for event in FakeEvent.made:
        event.is_over = True
    FakeEvent.made[-1].is_over = True
    rest = list(run)
    assert len(enqueued) == 6
    assert len(rest) == 3
    assert inlet.has_come is None
    assert begun == ["begin", "end"]


def test_a_chunk_that_is_given_up_ends_on_the_device(begun):
    run, inlet = run_of([NO_CROSSING, 0, 1])
    next(run)
    run.close()
    assert begun == ["begin", "end"]
    assert inlet.has_come is None
