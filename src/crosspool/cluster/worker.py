"""RankWorker: the one worker that a rank runs, made by the backend inside the rank's own thread or process."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from crosspool.backends.base import AttentionWorker, FFNWorker, Progress
from crosspool.cluster.base import ModelPlacement


class LoadsModels(Protocol):
    """What the workers of both pools have in common."""

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None: ...

    def remove_model(self, model: str) -> None: ...

    def memory_bytes(self) -> Mapping[str, int]: ...


@dataclass(frozen=True, slots=True)
class RankWorker:
    """A worker of one of the pools: an attention worker on a KV rank, an FFN worker on a weights rank."""

    attention_worker: AttentionWorker | None = None
    ffn_worker: FFNWorker | None = None

    @property
    def is_kv(self) -> bool:
        return self.attention_worker is not None

    @property
    def loads(self) -> LoadsModels:
        return self.ffn if self.attention_worker is None else self.attention_worker

    @property
    def attention(self) -> AttentionWorker:
        assert self.attention_worker is not None, "a weights rank was given a KV rank's work"
        return self.attention_worker

    @property
    def ffn(self) -> FFNWorker:
        assert self.ffn_worker is not None, "a KV rank was given a weights rank's work"
        return self.ffn_worker


def make_worker(backend: str, rank: str, is_kv: bool, num_frames: int, frame_bytes: int) -> RankWorker:
    """The worker of a rank.

    `backend` is `numpy`, or a module with `attention_worker(num_frames, frame_bytes)` and `ffn_worker(rank)`.
    """
    if backend == "numpy":
        return _numpy_worker(rank, is_kv, num_frames, frame_bytes)
    module = importlib.import_module(backend)
    if is_kv:
        return RankWorker(attention_worker=module.attention_worker(num_frames, frame_bytes))
    return RankWorker(ffn_worker=module.ffn_worker(rank))


def _numpy_worker(rank: str, is_kv: bool, num_frames: int, frame_bytes: int) -> RankWorker:
    if is_kv:
        from crosspool.backends.numpy.kv_worker import NumpyAttentionWorker

        return RankWorker(attention_worker=NumpyAttentionWorker(num_frames, frame_bytes))
    from crosspool.backends.numpy.ffn_worker import NumpyFFNWorker

    return RankWorker(ffn_worker=NumpyFFNWorker(rank))
