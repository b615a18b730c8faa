"""Intake accepts a request's sequences or refuses them all; the Admitter lets those that wait into the KV pool."""

from collections.abc import Sequence as Items

from crosspool.core import Request
from crosspool.engine.config import EngineConfig
from crosspool.engine.lengths import check_length
from crosspool.engine.model_loads import ModelLoad, ModelLoads
from crosspool.engine.queues import AdmissionOrder
from crosspool.engine.rank_health import RankHealth
from crosspool.engine.sequence import Sequence, SequenceState
from crosspool.errors import CrossPoolError, ShuttingDownError, WorkerLostError
from crosspool.kv_pool.block_table import BlockTable


class Admitter:
    """Which waiting sequence comes in next, and to which home.

    is_due: a sequence has come, or something has changed that may let one in. Until it is set nobody is looked at.
    """

    def __init__(self, config: EngineConfig, models: ModelLoads, ranks: RankHealth) -> None:
        self.is_due = False
        self._max_num_seqs = config.max_num_seqs
        self._order = AdmissionOrder(ageing_s=config.ageing_s, bypass_window=config.bypass_window)
        self._loads, self._kv = models.by_name, models.kv
        self._ranks = ranks

    def admit(self, now: float) -> None:
        """Admit all that fit, if that is due."""
        if not self.is_due:
            return
        self.is_due = False
        for names in self._kv.groups:
            loads = [self._loads[name] for name in names]
            while self._admit_one(loads, now):
                pass
        self.is_due |= self._kv.has_stalled

    def _admit_one(self, loads: Items[ModelLoad], now: float) -> bool:
        """Admit the next sequence of models that have KV ranks in common, if one may come in now."""
        kv = self._kv
        homes = {
            load.model.name: [home for home in load.homes_up(self._ranks) if kv.is_open(load.model.name, home)]
            for load in loads
            if load.num_live < self._max_num_seqs
        }
        queues = [load.queue for load in loads if homes.get(load.model.name)]

        def fits(sequence: Sequence) -> bool:
            return kv.home_for(sequence, homes[sequence.request.model]) is not None

        sequence = self._order.pick(queues, now, kv.frames_used, fits, kv.is_capped, kv.is_floored)
        if sequence is None:
            return False
        load = self._loads[sequence.request.model]
        home = kv.home_for(sequence, homes[load.model.name])
        assert home is not None
        load.queue.take(sequence, now)
        kv.admit(sequence, home)
        load.enter(sequence, SequenceState.PREFILLING)
        return True


class Intake:
    """Numbers sequences and puts them into `sequences`, by id those that have not ended."""

    def __init__(
        self, models: ModelLoads, ranks: RankHealth, admitter: Admitter, sequences: dict[int, Sequence]
    ) -> None:
        self._models = models
        self._ranks = ranks
        self._admitter = admitter
        self._sequences = sequences
        self._next_sequence_id = 1

    def add(self, requests: Items[Request], now: float) -> list[int]:
        """Accept one request's sequences, all or none; returns their ids.

        Raises UnknownModelError, ContextLengthError, CapacityError, QueueFullError, WorkerLostError, ShuttingDownError.
        """
        load = self._models.of(requests[0].model)
        try:
            return self._accept(load, requests, now)
        except CrossPoolError:
            load.num_refused += len(requests)
            raise

    def _accept(self, load: ModelLoad, requests: Items[Request], now: float) -> list[int]:
        if load.draining:
            raise ShuttingDownError(f"model {load.model.name} is being removed and takes no new requests")
        expires_s = load.expires_s(self._ranks)
        if expires_s is not None and expires_s <= now:
            raise WorkerLostError(self._ranks.describe(load.ranks, load.model.name, now))
        num_frames = self._models.reach(load.model)
        for request in requests:
            check_length(load.model, num_frames, len(request.prompt_token_ids), request.sampling.max_tokens)
        sequences = [self._new_sequence(load, request) for request in requests]
        for sequence in sequences:
            load.queue.push(sequence)
        self._admitter.is_due = True
        self._admitter.admit(now)  # so that the bound holds for what really has to wait
        if (refusal := load.queue.overflow(len(requests), requests[0].key)) is not None:
            for sequence in sequences:
                self._withdraw(load, sequence)
            raise refusal
        for sequence in sequences:
            self._sequences[sequence.sequence_id] = sequence
        load.num_accepted += len(sequences)
        return [sequence.sequence_id for sequence in sequences]

    def _new_sequence(self, load: ModelLoad, request: Request) -> Sequence:
        sequence_id = self._next_sequence_id
        self._next_sequence_id += 1
        return Sequence(sequence_id=sequence_id, request=request, table=BlockTable(load.model.page_tokens))

    def _withdraw(self, load: ModelLoad, sequence: Sequence) -> None:
        """Take back a sequence that was just pushed; it may have been admitted, but no step has a row of it."""
        if sequence.state is SequenceState.QUEUED:
            load.queue.remove(sequence)
        else:
            load.leave(sequence)
            self._models.kv.of(sequence).release(sequence)
