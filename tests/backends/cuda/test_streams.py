"""A stream is torch's current one within a block and no longer, whatever happens there. No GPU needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.device.streams import _OnStream, on_stream  # noqa: E402

pytestmark = pytest.mark.judge


@pytest.fixture
def current(monkeypatch):
    """By device: the current stream, as torch keeps it."""
    held = {0: (0, 0, 1), 1: (0, 1, 1)}

    def make_current(*, stream_id, device_index, device_type):
        held[device_index] = (stream_id, device_index, device_type)

    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", held.__getitem__, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setStream", make_current, raising=False)
    return held


def stream(number, device=1):
    return SimpleNamespace(stream_id=number, device_index=device, device_type=1)


def test_blocks_within_blocks_give_back_what_was_current(current):
    with _OnStream(stream(7)):
        assert current == {0: (0, 0, 1), 1: (7, 1, 1)}
        with _OnStream(stream(8)):
            assert current[1] == (8, 1, 1)
        assert current[1] == (7, 1, 1)
    assert current[1] == (0, 1, 1)


def test_a_failure_within_gives_it_back_too(current):
    with pytest.raises(RuntimeError), _OnStream(stream(7)):
        raise RuntimeError
    assert current[1] == (0, 1, 1)


def test_what_is_no_gpus_stream_changes_nothing(current):
    for each in (None, stream(7)):
        with on_stream(each):
            assert current == {0: (0, 0, 1), 1: (0, 1, 1)}
