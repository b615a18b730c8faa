"""ClusterModels: has ranks load the models that are placed on them, and makes events of what they say of it."""

import logging
from collections.abc import Callable, Sequence

from crosspool.cluster import messages
from crosspool.cluster.base import Event, LoadProgress, ModelBack, ModelFailed, ModelPlacement, RankReady
from crosspool.cluster.cluster_channels import ClusterChannels
from crosspool.cluster.cluster_steps import ClusterSteps
from crosspool.cluster.messages import ToRank
from crosspool.cluster.roster import Roster
from crosspool.cluster.supervisor import RankState, Supervisor

logger = logging.getLogger(__name__)


class ClusterModels:
    """Models from their placement to their removal; `roster` has how far each of them is on each of its ranks.

    A rank that came up, or came back, loads its models one after another. first: those that go before others.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        channels: ClusterChannels,
        steps: ClusterSteps,
        send: Callable[[str, ToRank], None],
        emit: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        self.roster = Roster()
        self.first: Sequence[str] = ()
        self._supervisor = supervisor
        self._channels = channels
        self._steps = steps
        self._send = send
        self._emit = emit
        self._clock = clock

    def add(self, placement: ModelPlacement) -> None:
        """Begin to load a model everywhere. Raises ValueError for a taken name."""
        name, ranks = placement.name, placement.ranks
        self.roster.add(placement, self._clock())
        for rank in ranks:
            if self._supervisor.state(rank) is RankState.FAILED:
                self.drop(name, f"{rank} could not be brought back; restart the server", is_loss=True)
                return
        try:
            self._channels.open_missing(self.roster.placements())
        except OSError as failure:
            self.drop(name, f"no memory for its channels: {failure}", is_loss=True)
            return
        for rank in ranks:
            if self._supervisor.state(rank) is RankState.READY:
                self._send(rank, self.roster.load(name, rank))
        self.settle_loads(ranks)

    def remove(self, name: str) -> None:
        """Free the model's share on every rank. Raises ValueError if there is none of the name."""
        ranks = self.roster.ranks(name)
        self.roster.remove(name)
        for rank in ranks:
            self._send(rank, messages.RemoveModel(name))
        self._channels.close_unused(self.roster.placements())
        self.settle_loads(ranks)

    def drop(self, name: str, error: str, *, is_loss: bool = False) -> None:
        """Remove a model that cannot be served, and fail its steps. is_loss: as in `ModelFailed`."""
        logger.warning("model %s is dropped: %s", name, error)
        self._steps.drop_model(name, self.roster.ranks(name), error)
        self.remove(name)
        self._emit(ModelFailed(name=name, error=error, is_loss=is_loss))

    def progressed(self, rank: str, told: messages.Loading) -> None:
        """A rank has read more of a model."""
        if not self.roster.is_current(told.model, rank, told.load_id):
            return
        self._emit(
            LoadProgress(name=told.model, rank=rank, loaded_bytes=told.loaded_bytes, total_bytes=told.total_bytes)
        )
        if told.loaded_bytes >= told.total_bytes:
            self.roster.has_read(told.model, rank)
            self.settle_loads((rank,))

    def loaded(self, rank: str, told: messages.Loaded) -> None:
        """A rank holds its share of a model."""
        if not self.roster.is_current(told.model, rank, told.load_id):
            return
        ready = self.roster.has_loaded(told.model, rank, told.num_bytes, self._clock())
        self.settle_loads((rank,))
        if ready is not None:
            self._emit(ready)
        elif self._supervisor.state(rank) is RankState.LOADING and self.roster.is_announced(told.model):
            logger.info("%s serves %s again, and loads others still", rank, told.model)
            self._emit(ModelBack(rank=rank, model=told.model))

    def failed(self, rank: str, told: messages.LoadFailed) -> None:
        """A rank could not load its share of a model."""
        if self.roster.is_current(told.model, rank, told.load_id):
            self.drop(told.model, f"{rank}: {told.error}")

    def settle_loads(self, ranks: Sequence[str]) -> None:
        """A rank that came (back) up loads its models one after another, and is ready once none is left."""
        for rank in ranks:
            if self._supervisor.state(rank) is not RankState.LOADING:
                continue
            if (load := self.roster.next_load(rank, self.first)) is not None:
                self._send(rank, load)
            elif not self.roster.is_loading(rank):
                seconds = self._supervisor.has_loaded(rank, self._clock())
                logger.info("%s is ready after %.2f s", rank, seconds)
                self._emit(RankReady(rank=rank, seconds=seconds))
