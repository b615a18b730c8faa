"""What makes a stream torch's current one for the few kernels of a piece or a step."""

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch


class _OnStream:
    """As `torch.cuda.stream`, which takes several times as long: it makes objects of streams, and looks at devices."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._before: tuple[int, int, int] = (0, 0, 0)

    def __enter__(self) -> None:
        stream = self._stream
        self._before = torch._C._cuda_getCurrentStream(stream.device_index)
        _make_current(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        _make_current(*self._before)


def _make_current(stream_id: int, device_index: int, device_type: int) -> None:
    torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def on_stream(stream: Any) -> AbstractContextManager[None]:
    """Within it `stream`, of the thread's own device, is torch's current one; nothing where it is no GPU's."""
    return _OnStream(stream) if isinstance(stream, torch.cuda.Stream) else nullcontext()
