"""Intake accepts a request's sequences or refuses them all; the Admitter lets those that wait into the KV pool."""

from collections.abc import Sequence as Items

from crosspool.core import Request
from crosspool.engine.config import EngineConfig
from crosspool.engine.lengths import check_length
from crosspool.engine.live_models import LiveModel, LiveModels
from crosspool.engine.queues import AdmissionOrder
from crosspool.engine.rank_health import RankHealth
from crosspool.engine.sequence import Sequence, SequenceState
from crosspool.errors import CrossPoolError, ModelRemovedError, WorkerLostError
from crosspool.kv_pool.block_table import BlockTable


class Admitter:
    """Which waiting sequence comes in next, and to which home.

    is_due: a sequence has come, or something has changed that may let one in. Until it is set nobody is looked at.
    """

    def __init__(self, config: EngineConfig, models: LiveModels, ranks: RankHealth) -> None:
        self.is_due = False
        self._max_num_seqs = config.max_num_seqs
        self._order = AdmissionOrder(ageing_s=config.ageing_s, bypass_window=config.bypass_window)
        self._live_models, self._kv = models.by_name, models.kv
        self._ranks = ranks

    def admit(self, now: float) -> None:
        """Admit all that fit, if that is due."""
        if not self.is_due:
            return
        self.is_due = False
        for names in self._kv.groups:
            live_models = [self._live_models[name] for name in names]
            while self._admit_one(live_models, now):
                pass
        self.is_due |= self._kv.has_stalled

    def _admit_one(self, live_models: Items[LiveModel], now: float) -> bool:
        """Admit the next sequence of models that have KV ranks in common, if one may come in now."""
        kv = self._kv
        homes = {
            live.model.name: [home for home in live.homes_up(self._ranks) if kv.is_open(live.model.name, home)]
            for live in live_models
            if live.num_live < self._max_num_seqs
        }
        queues = [live.queue for live in live_models if homes.get(live.model.name)]

        def fits(sequence: Sequence) -> bool:
            return kv.home_for(sequence, homes[sequence.request.model]) is not None

        sequence = self._order.pick(queues, now, kv.frames_used, fits, kv.is_capped, kv.is_floored)
        if sequence is None:
            return False
        live = self._live_models[sequence.request.model]
        home = kv.home_for(sequence, homes[live.model.name])
        assert home is not None
        live.queue.take(sequence, now)
        kv.admit(sequence, home)
        live.enter(sequence, SequenceState.PREFILLING)
        return True


class Intake:
    """Numbers sequences and puts them into `sequences`, by id those that have not ended."""

    def __init__(
        self, models: LiveModels, ranks: RankHealth, admitter: Admitter, sequences: dict[int, Sequence]
    ) -> None:
        self._models = models
        self._ranks = ranks
        self._admitter = admitter
        self._sequences = sequences
        self._next_sequence_id = 1

    def add(self, requests: Items[Request], now: float) -> list[int]:
        """Accept one request's sequences, all or none; returns their ids.

        Raises UnknownModelError, ContextLengthError, CapacityError, QueueFullError, WorkerLostError, ModelRemovedError.
        """
        live = self._models.of(requests[0].model)
        try:
            return self._accept(live, requests, now)
        except CrossPoolError:
            live.num_refused += len(requests)
            raise

    def _accept(self, live: LiveModel, requests: Items[Request], now: float) -> list[int]:
        if live.draining:
            raise ModelRemovedError(f"model {live.model.name} is being removed and takes no new requests; ask another")
        expires_s = live.expires_s(self._ranks)
        if expires_s is not None and expires_s <= now:
            raise WorkerLostError(self._ranks.describe(live.ranks, live.model.name, now))
        num_frames = self._models.kv.reach(live.model)
        for request in requests:
            check_length(live.model, num_frames, len(request.prompt_token_ids), request.sampling.max_tokens)
        sequences = [self._new_sequence(live, request) for request in requests]
        for sequence in sequences:
            live.queue.push(sequence)
        self._admitter.is_due = True
        self._admitter.admit(now)  # so that the bound holds for what really has to wait
        if (refusal := live.queue.overflow(len(requests), requests[0].key)) is not None:
            for sequence in sequences:
                self._withdraw(live, sequence)
            raise refusal
        for sequence in sequences:
            self._sequences[sequence.sequence_id] = sequence
        live.num_accepted += len(sequences)
        return [sequence.sequence_id for sequence in sequences]

    def _new_sequence(self, live: LiveModel, request: Request) -> Sequence:
        sequence_id = self._next_sequence_id
        self._next_sequence_id += 1
        return Sequence(sequence_id=sequence_id, request=request, table=BlockTable(live.model.page_tokens))

    def _withdraw(self, live: LiveModel, sequence: Sequence) -> None:
        """Take back a sequence that was just pushed; it may have been admitted, but no step has a row of it."""
        if sequence.state is SequenceState.QUEUED:
            live.queue.remove(sequence)
        else:
            live.leave(sequence)
            self._models.kv.of(sequence).release(sequence)
