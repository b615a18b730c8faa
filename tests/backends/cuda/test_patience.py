"""Prompts step aside for decode, but no longer than they may on average."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.weights_rank.patience import MOST_BEHIND_S, PIECE_S, TOKEN_S, Patience  # noqa: E402

pytestmark = pytest.mark.judge

TOKENS = 1024
ALLOWED_S = PIECE_S + TOKENS * TOKEN_S


class Moment:
    """An event whose time the test says; it has come once it is `over`."""

    def __init__(self) -> None:
        self.at_ms, self.over = 0.0, False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.over

    def elapsed_time(self, end) -> float:
        return end.at_ms - self.at_ms


class Device:
    def __init__(self, **options) -> None:
        self.made: list[Moment] = []
        self.patience = Patience(self.make, **options)

    def make(self) -> Moment:
        self.made.append(Moment())
        return self.made[-1]

    def enqueue(self) -> Moment:
        with self.patience.timed(TOKENS):
            pass
        return self.made[-1]

    def run(self, seconds: float) -> bool:
        """A piece that takes so long; whether the next one is urgent."""
        end = self.enqueue()
        end.at_ms, end.over = seconds * 1e3, True
        return self.patience.is_out


def test_pieces_within_their_time_never_become_urgent():
    device = Device()
    assert not any(device.run(ALLOWED_S * 0.99) for _ in range(100))


def test_over_time_pieces_take_what_they_may_on_average():
    """A starved piece takes 20 ms, an urgent one half of what it may."""
    device, is_urgent, times = Device(), False, []
    for _ in range(400):
        times.append(ALLOWED_S / 2 if is_urgent else 20 * ALLOWED_S)
        is_urgent = device.run(times[-1])
    assert sum(times) / len(times) == pytest.approx(ALLOWED_S, rel=0.1)


def test_what_is_behind_is_bounded():
    device = Device()
    device.run(10.0)
    assert device.patience.behind_s == MOST_BEHIND_S


def test_a_fast_piece_earns_nothing_for_later():
    device = Device()
    for _ in range(50):
        device.run(0.0)
    assert device.run(ALLOWED_S * 1.01)


def test_a_piece_that_has_not_ended_says_nothing():
    device = Device()
    device.enqueue()
    assert not device.patience.is_out
    device.made[-1].at_ms, device.made[-1].over = 1e3, True
    assert device.patience.is_out


def test_without_patience_every_piece_is_urgent():
    assert Patience(Moment, has_any=False).is_out


def test_nothing_is_timed_where_kernels_are_emulated():
    patience = Patience(None)
    with patience.timed(TOKENS):
        pass
    assert not patience.is_out
