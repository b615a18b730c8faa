"""RankWorker: the one worker that a rank runs, and what else of a backend the rank's loop may ask for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from crosspool.backends.base import (
    AttentionWorker,
    FFNWorker,
    Inlet,
    NewLink,
    Outlet,
    PrefillWorker,
    Progress,
    ShareWorker,
)
from crosspool.cluster.base import ModelPlacement
from crosspool.kv_pool.ahead import Hint
from crosspool.kv_pool.backing.base import BackingCounts
from crosspool.kv_pool.host_tier import FrameCopy
from crosspool.scheduler.step import StepDescriptor, StepHeader


class LoadsModels(Protocol):
    """What the workers of both pools have in common."""

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None: ...

    def remove_model(self, model: str) -> None: ...

    def memory_bytes(self) -> Mapping[str, int]: ...


class OpensLinks(Protocol):
    """A worker whose channels lie elsewhere than in the host memory that the cluster gives both ends."""

    def open_link(self, new: NewLink) -> tuple[Outlet, Inlet]:
        """This rank's ends of the link, in place of those that the lane had with the peer."""
        ...

    def close_links(self, peer: str) -> None: ...


class MapsPages(Protocol):
    """The KV frames of a rank where they are mapped ahead of need (`kv_pool/backing`)."""

    def hint(self, hints: Sequence[Hint]) -> None:
        """What models will need soon, and what nobody needs."""
        ...

    def counts(self) -> BackingCounts: ...


class CopiesFrames(Protocol):
    """Host memory of a rank for pages that its pool gives up (`kv_pool/host_tier.py`)."""

    def copy(self, copies: Sequence[FrameCopy]) -> None:
        """Carry them out in their order; no step under way uses their frames."""
        ...


class BeginsAhead(Protocol):
    """A worker whose device goes on by itself from one of a lane's steps to the next."""

    def may_begin_ahead(self, work: StepDescriptor | StepHeader) -> bool:
        """Whether the first segment of the step may run now, while the lane's step before it does.

        It then hands the device all of the step; the second segment runs once the step before has ended here.
        """
        ...


@dataclass(frozen=True, slots=True)
class RankWorker:
    """A rank's worker: an attention worker on a KV rank, an FFN worker on a weights rank, or a prefill worker."""

    attention_worker: AttentionWorker | None = None
    ffn_worker: FFNWorker | None = None
    prefill_worker: PrefillWorker | None = None
    links: OpensLinks | None = None  # None: channels in host memory
    share_worker: ShareWorker | None = None  # None: the backend cannot split a model over KV ranks
    mapping: MapsPages | None = None  # None: frames are where they are
    copying: CopiesFrames | None = None  # None: there is no host memory for pages
    ahead: BeginsAhead | None = None  # None: a step begins once the one before it has ended

    @property
    def is_kv(self) -> bool:
        return self.attention_worker is not None

    @property
    def loads(self) -> LoadsModels:
        return self.attention_worker or self.prefill_worker or self.ffn

    @property
    def attention(self) -> AttentionWorker:
        assert self.attention_worker is not None, "a weights rank was given a KV rank's work"
        return self.attention_worker

    @property
    def share(self) -> ShareWorker:
        if self.share_worker is None:
            raise ValueError("this backend does not split a model over KV ranks; use one KV rank")
        return self.share_worker

    @property
    def host_frames(self) -> CopiesFrames:
        assert self.copying is not None, "a rank without host memory was told to copy pages"
        return self.copying

    @property
    def ffn(self) -> FFNWorker:
        assert self.ffn_worker is not None, "a KV rank was given a weights rank's work"
        return self.ffn_worker
