"""Intake: accepts a request's sequences or refuses them all, before anything else happens to them."""

from collections.abc import Sequence as Items

from crosspool.core import Request
from crosspool.engine.admitter import Admitter
from crosspool.engine.lengths import check_length
from crosspool.engine.model_loads import ModelLoad, ModelLoads
from crosspool.engine.ranks import RankHealth
from crosspool.engine.sequence import Sequence, SequenceState
from crosspool.errors import CrossPoolError, ShuttingDownError, WorkerLostError
from crosspool.kv_pool.block_table import BlockTable


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
            raise WorkerLostError(self._ranks.describe(load.ranks, now))
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
