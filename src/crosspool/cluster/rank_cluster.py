"""RankCluster: the parent of the ranks. Carries models and steps to them, watches them, tells what happened.

All of it runs in the caller's thread, within `poll` and the other calls; the ranks' work too where a host has no thread
of its own. Only `wake` may come from another thread. What it knows is kept in parts: `HostWatch` (hosts, and where
ranks stand), `ClusterModels`, `ClusterChannels` and `ClusterSteps`; `HostPost` is how it waits.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from crosspool.cluster import messages
from crosspool.cluster.base import Event, ModelPlacement, RankFailed, RankLost
from crosspool.cluster.channel_book import ChannelBook
from crosspool.cluster.checks import check_placement, check_step
from crosspool.cluster.cluster_channels import ClusterChannels
from crosspool.cluster.cluster_models import ClusterModels
from crosspool.cluster.cluster_steps import ClusterSteps
from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.doorbell import Board, Doorbell
from crosspool.cluster.host import Host
from crosspool.cluster.host_post import HostPost
from crosspool.cluster.host_watch import HostWatch
from crosspool.cluster.messages import FromRank
from crosspool.cluster.region import Region
from crosspool.cluster.supervisor import RankState
from crosspool.cluster.turned_host import TurnedHost
from crosspool.kv_pool.ahead import Hint
from crosspool.kv_pool.backing.base import BackingCounts
from crosspool.kv_pool.host_tier import FrameCopy
from crosspool.scheduler.step import StepDescriptor

logger = logging.getLogger(__name__)

NEVER_S = float("inf")


class RankCluster:
    """The cluster (`base.Cluster`) over hosts of either layout. `start.py` builds it.

    A rank that is lost takes down the steps that need it, and only those. A weights rank's steps fail by the KV rank's
    word (see `InFlight`); a KV rank's fail at once. The rank comes back alone: its models are loaded again, one after
    another, each of use as soon as it is there, and the channels with its peers are made anew, while every other lane
    goes on.
    """

    def __init__(
        self,
        config: ClusterConfig,
        hosts: Sequence[Host],
        doorbell: Doorbell,
        board: Board,
        open_region: Callable[[int], Region],
        release: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        turned: Sequence[TurnedHost] = (),
    ) -> None:
        """turned: those of `hosts` that have no thread of their own and work within `poll`."""
        self._config = config
        self._hosts = hosts
        self._turned = turned
        self._doorbell = doorbell
        self._release = release
        self._clock = clock
        self._watch = HostWatch(hosts, board, config, clock)
        self._supervisor = self._watch.supervisor
        self._send = self._watch.send
        self._memory: dict[str, dict[str, int]] = {rank: {} for rank in config.ranks}
        self._backings: dict[str, BackingCounts] = {}
        self._events: list[Event] = []
        self._steps = ClusterSteps(self._send, self._events.append)
        self._book = ChannelBook(
            config.num_lanes,
            config.max_tokens_per_step,
            hands_in_parts=config.backend == "cuda",
            may_use=config.may_use,
        )
        self._channels = ClusterChannels(self._book, open_region, self._send, self._supervisor.is_up)
        self._models = ClusterModels(
            self._supervisor, self._channels, self._steps, self._send, self._events.append, clock
        )
        self._roster = self._models.roster
        self._is_woken = False
        self._is_closed = False
        self._watch_s = 0.0  # when to look after the hosts again; 0: at once
        self._post = HostPost(hosts, doorbell, board)
        self._launch_due(clock())

    def add_model(self, placement: ModelPlacement) -> None:
        """Begin to load the model everywhere. Raises ValueError for a taken name or an unknown rank."""
        check_placement(placement, self._config)
        self._models.add(placement)
        self._watch_s = 0.0

    def remove_model(self, name: str) -> None:
        """Free the model's share on every rank. Raises ValueError if there is none of the name."""
        self._models.remove(name)

    def load_first(self, models: Sequence[str]) -> None:
        """In which order ranks that come back load their models again, from now on: these first."""
        self._models.first = tuple(models)

    def submit(self, step: StepDescriptor) -> None:
        """Hand one step to its lane's ranks; a StepFailed follows at once if one of them is away.

        Raises ValueError for a model that is not ready, too many tokens, or a lane that has two steps already.
        """
        header = step.header
        placement = self._roster.placement(header.model)
        if not self._roster.is_announced(header.model):
            raise ValueError(f"model {header.model} is not loaded yet; submit after its ModelReady")
        check_step(header, placement, self._config.max_tokens_per_step)
        ranks = placement.step_ranks(header.kv_rank, header.prefill_rank)
        away = tuple(rank for rank in ranks if not self._roster.holds(rank, header.model))
        if away:
            is_final = any(self._supervisor.state(rank) is RankState.FAILED for rank in away)
            error = f"{', '.join(away)} {'could not be brought back' if is_final else 'is away'}"
            self._steps.fail(header.lane, header.step_seq, away, error, is_final)
            return
        if self._book.needs_lane(header.lane):
            self._channels.open_missing(self._roster.placements())
        if not self._steps:
            self._watch_s = 0.0
        self._steps.begin(step, placement, ranks)

    def forget(self, kv_rank: str, sequence_ids: Sequence[int]) -> None:
        """Let the KV rank drop sequences; one that is away has none."""
        self._send(kv_rank, messages.Forget(tuple(sequence_ids)))

    def map_ahead(self, kv_rank: str, hints: Sequence[Hint]) -> None:
        """Tell a KV rank with mapped frames what models will need."""
        self._send(kv_rank, messages.MapAhead(tuple(hints)))

    def copy_frames(self, kv_rank: str, copies: Sequence[FrameCopy]) -> None:
        """Let a KV rank copy pages before the steps that are submitted from now on; one that is away has none."""
        self._send(kv_rank, messages.CopyFrames(tuple(copies)))

    def poll(self, timeout_s: float) -> list[Event]:
        """Events since the last call; waits up to `timeout_s` for the first, without spinning."""
        now_s = self._clock()
        until_s = now_s + timeout_s
        while True:
            if any([host.turn(lambda: self._is_woken) for host in self._turned]):
                self._receive(range(len(self._hosts)))
            else:
                may_wait = not (self._events or self._is_woken) and self._watch_s > now_s
                self._receive(self._post.wait(max(0.0, min(until_s, self._watch_s) - now_s) if may_wait else 0.0))
            now_s = self._clock()
            if now_s >= self._watch_s:
                self._look_after_hosts(now_s)
            if self._events or self._is_woken or now_s >= until_s:
                break
        self._is_woken = False
        events = list(self._events)
        self._events.clear()
        return events

    def wake(self) -> None:
        """Make a `poll` in another thread return at once."""
        self._is_woken = True
        if not self._is_closed:
            self._doorbell.ring()

    def memory_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes by rank and kind, as the workers last reported them; nothing for a rank that is away."""
        return {rank: dict(kinds) for rank, kinds in self._memory.items()}

    def backing_counts(self) -> dict[str, BackingCounts]:
        """What mapping has done on each KV rank with mapped frames, as last told."""
        return dict(self._backings)

    def states(self) -> dict[str, RankState]:
        """Where every rank stands."""
        return {rank: self._supervisor.state(rank) for rank in self._watch.host_of}

    def pids(self) -> dict[str, int]:
        """The process of each rank that lives in one of its own and is not known to have ended."""
        return {rank: host.pid for host in self._hosts for rank in host.ranks if host.pid is not None}

    def close(self) -> None:
        """Stop every rank; nothing of it is left. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._watch.stop():
            self._release()  # a thread that lives on may still use doorbells and board

    def _owing(self) -> list[int]:
        """Hosts that have a step to run or a model to load."""
        ranks = self._watch.host_of.items()
        return [host for rank, host in ranks if self._steps.is_on(rank) or self._roster.is_loading(rank)]

    def _receive(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            host = self._hosts[number]
            self._post.will_read(number)
            if not self._supervisor.is_up(host.ranks[0]):
                continue
            try:
                for rank, message in host.receive():
                    self._handle(rank, message)
            except EOFError:
                self._lose(number, None)

    def _handle(self, rank: str, message: FromRank) -> None:
        match message:
            case messages.StepFinished():
                self._steps.finished(rank, message)
            case messages.StepTold(lane, step_seq, steps):
                self._steps.told(rank, lane, step_seq, steps)
            case messages.StepEnded():
                for accused in self._steps.ended(rank, message):
                    if (reason := self._watch.accused(accused)) is not None:
                        self._lose(self._watch.host_of[accused], reason)
            case messages.Hello():
                self._watch_s = 0.0
                self._supervisor.said_hello(rank)
                self._models.settle_loads((rank,))
            case messages.Ending(reason):
                self._watch.said_why(rank, reason)
            case messages.MemoryReport(bytes_by_kind):
                self._memory[rank] = dict(bytes_by_kind)
            case messages.BackingReport(counts):
                self._backings[rank] = counts
            case messages.Loading():
                self._models.progressed(rank, message)
            case messages.Loaded():
                self._models.loaded(rank, message)
            case messages.LoadFailed():
                self._models.failed(rank, message)

    def _look_after_hosts(self, now_s: float) -> None:
        """Start what is due, and end what hangs."""
        self._launch_due(now_s)
        owing = self._owing()
        for number, reason in self._watch.hung(now_s, owing):
            self._lose(number, reason)
        look_s = self._supervisor.next_look_s(now_s, owing)
        self._watch_s = NEVER_S if look_s is None else look_s

    def _lose(self, number: int, reason: str | None, *, was_launched: bool = True) -> None:
        """A host has ended, or hangs for the given reason and is ended here, or could not be launched."""
        self._watch_s = 0.0
        loss = self._watch.end(number, reason, was_launched=was_launched)
        if loss is None:
            return
        ranks, reason, will_restart = loss
        blamed = []
        for rank in ranks:
            logger.warning("%s is lost: %s", rank, reason)
            self._memory[rank] = {}
            self._book.rank_lost(rank)
            blamed += self._roster.rank_lost(rank)
            self._events.append(RankLost(rank=rank, reason=reason))
            self._steps.lose(rank, f"{rank} is lost: {reason}")
            if not will_restart:
                blamed += self._roster.new_models(rank)
                self._events.append(RankFailed(rank=rank, error=f"{rank} does not come back: {reason}"))
        for model in dict.fromkeys(blamed):
            self._models.drop(model, f"{', '.join(ranks)} was lost while it loaded: {reason}", is_loss=True)

    def _launch_due(self, now_s: float) -> None:
        for number in self._supervisor.due(now_s):
            try:
                self._watch.launch(number, now_s)
                self._channels.open_missing(self._roster.placements())
            except OSError as failure:  # no memory or no descriptors: as if it had died at once
                self._lose(number, f"cannot be started: {failure}", was_launched=False)
