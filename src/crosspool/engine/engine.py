"""Engine: one thread that drives the pure core and a cluster, and the thread-safe calls around it.

Callers' threads only accept and refuse (`submit`) and leave notes (`abort`, `add_model`, ...); every call to the
cluster but `wake` is made by the engine thread. A turn of it is `_step`: what has happened is taken in, steps are
handed out, and callers get their outputs.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import replace

from crosspool.cluster.base import Cluster, Event, RankFailed
from crosspool.core import FinishReason, Request
from crosspool.engine.callers import Callers, Delivery, Flush, Sink, deliver
from crosspool.engine.config import EngineConfig
from crosspool.engine.engine_core import EngineCore
from crosspool.engine.expand import check_ids, detokenizer, sequences
from crosspool.engine.limit_change import LimitChange
from crosspool.engine.model_lifecycle import ModelLifecycle
from crosspool.engine.output_builder import OutputBuilder
from crosspool.engine.request import MAX_SEED, GenerationRequest
from crosspool.engine.sequence import SequenceUpdate
from crosspool.engine.served_model import ServedModel
from crosspool.engine.stats import EngineStats, ModelInfo
from crosspool.engine.step_log import StepSpan
from crosspool.errors import CrossPoolError, ModelRemovedError, ShuttingDownError, WorkerLostError
from crosspool.scheduler.step import StepDescriptor

logger = logging.getLogger(__name__)

IDLE_POLL_S = 60.0
"""Longest sleep of an idle engine; events and calls wake it sooner."""


class Engine:
    """Serves models from a cluster until closed. `start` is called once, before anything else."""

    def __init__(self, config: EngineConfig, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._cluster = cluster
        self._clock = clock
        self._core = EngineCore(config)
        self._models = ModelLifecycle(self._core, cluster, config.max_sequences)
        self._callers = Callers(self._core.end_sequence)
        self._lock = threading.Lock()
        self._calls: deque[Callable[[float], list[SequenceUpdate]]] = deque()  # run on the engine thread
        self._closing = False
        self._stopped = False
        self._failure: str | None = None
        self._ended = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name="crosspool-engine", daemon=True)

    def start(self) -> "Engine":
        self._thread.start()
        return self

    def submit(self, request: GenerationRequest, sink: Sink, flush: Flush | None = None) -> None:
        """Accept or refuse a request at once, in the caller's thread; outputs then come to `sink`.

        Raises what `Intake.add` raises, and ValueError for token ids that the model does not have or a
        request id that is running.
        """
        with self._lock:
            self._check_open()
            model = self._models.ready_model(request.model)
            if request.request_id in self._callers:
                raise ValueError(f"a request with id {request.request_id!r} is already running; give each its own id")
            check_ids(request, model.spec.vocab_size)
            now = self._clock()
            builders = [OutputBuilder(request, index, detokenizer(request, model), now) for index in range(request.n)]
            ids = self._core.add_requests(self._expand(request, model, now), now)
            self._callers.add(request.request_id, ids, builders, sink, flush)
        self._cluster.wake()

    def abort(self, request_id: str) -> bool:
        """End every sequence of the request with ABORT, from any thread; False if it is not running."""
        if request_id not in self._callers:
            return False
        self._calls.append(lambda now: self._end_request(request_id, now))
        self._cluster.wake()
        return True

    def add_model(self, model: ServedModel) -> Future[ModelInfo]:
        """Start to load a model. The future ends with its info, or with CheckpointError, WorkerLostError where a rank
        is to blame, or CapacityError.

        Raises ValueError for a taken name and CapacityError where the KV pool cannot hold a page of it.
        """
        with self._lock:
            self._check_open()
            registered = self._models.register(model)
            self._calls.append(lambda now: self._load(model))
        self._cluster.wake()
        return registered.added

    def remove_model(self, name: str, *, drain: bool = True) -> Future[None]:
        """Refuse new requests to a model and free it once the accepted ones have ended.

        Without `drain` they end now, with ModelRemovedError. Raises UnknownModelError; ValueError while it loads;
        WorkerLostError or ShuttingDownError where nobody would come to remove it.
        """
        with self._lock:
            self._check_open()
            removed = self._models.retire(name)
            if not drain:
                error = ModelRemovedError(f"model {name} was removed while this request was running")
                self._calls.append(lambda now: self._models.end(name, error, now))
        self._cluster.wake()
        return removed

    def set_limits(self, change: LimitChange) -> None:
        """Change what models may hold in the KV pool, at once and from any thread. Live requests are not touched.

        Queued requests that no longer can fit end with CapacityError. Raises UnknownModelError, and ValueError, with
        the true numbers, for limits that cannot be held; then nothing has changed.
        """
        with self._lock:
            self._check_open()
            self._core.set_limits(change)
            self._models.tell_contexts()
            self._calls.append(self._core.refuse_unfitting)
        self._cluster.wake()

    def trim(self, model: str) -> int:
        """Give the model's cached pages that no request uses back to the pool, from any thread; the number of frames.

        Nothing needs this: reusable pages are as good as free. Raises UnknownModelError.
        """
        with self._lock:
            self._check_open()
            return self._core.trim(model)

    def models(self) -> list[ModelInfo]:
        with self._lock:
            return self._models.infos()

    def model(self, name: str) -> ModelInfo:
        with self._lock:
            return self._models.registry.get(name).info

    def stats(self) -> EngineStats:
        with self._lock:
            stats = self._core.stats(self._clock())
        if self.config.kv_backing == "arena":
            return stats
        return replace(stats, backings=self._cluster.backing_counts())

    def steps_since(self, moment_s: float) -> list[StepSpan]:
        """Steps that ended after `moment_s` of the engine's clock, as far back as they are kept."""
        with self._lock:
            return self._core.log.since(moment_s)

    def memory_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes by rank and kind, as the workers last reported them."""
        return self._cluster.memory_bytes()

    def check(self) -> None:
        """Raises WorkerLostError if the engine thread has failed and ShuttingDownError if it is closing."""
        with self._lock:
            self._check_open()

    def close(self, *, drain_s: float = 0.0) -> None:
        """Refuse new requests, wait `drain_s` for the accepted ones, end the rest with an error, stop the workers."""
        with self._lock:
            self._closing = True
            self._ended.wait_for(lambda: not self._callers or self._failure is not None, timeout=drain_s)
            if self._stopped:
                return
            self._stopped = True
        if self._thread.ident is not None:  # it was started
            self._cluster.wake()
            self._thread.join()
        self._cluster.close()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise WorkerLostError(self._failure)
        if self._closing:
            raise ShuttingDownError("the engine is shutting down and takes no new requests")

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._step(self._cluster.poll(self._poll_timeout_s()))
            error: CrossPoolError = ShuttingDownError("the engine was shut down while this request was running")
        except Exception as cause:  # a bug: nobody may wait for ever because of it
            logger.exception("the engine thread failed")
            failure = f"the engine failed: {type(cause).__name__}: {cause}"
            error = WorkerLostError(failure)
            with self._lock:
                self._failure = failure
        self._end_all(error)

    def _poll_timeout_s(self) -> float:
        with self._lock:
            now = self._clock()
            deadline = self._core.next_deadline(now)
        if self._calls or self._stopped:
            return 0.0
        return IDLE_POLL_S if deadline is None else min(IDLE_POLL_S, max(0.0, deadline - now))

    def _step(self, events: list[Event]) -> None:
        """Take in what has happened, hand out what can run, then make text and tell callers while it runs.

        Callers are told even if handing out fails.
        """
        outputs: list[Delivery] = []
        try:
            with self._lock:
                now = self._clock()
                updates = self._take_in(events, now)
                first = [update for update in updates if self._callers.watches_stop_strings(update)]
                later = [update for update in updates if not self._callers.watches_stop_strings(update)]
                self._callers.make_outputs(first, outputs, now)  # a stop string ends its sequence before the next step
                try:
                    self._hand_out(now)
                finally:
                    self._callers.make_outputs(later, outputs, now)
                if not self._callers:
                    self._ended.notify_all()
        finally:
            deliver(outputs, self.abort)

    def _take_in(self, events: list[Event], now: float) -> list[SequenceUpdate]:
        updates: list[SequenceUpdate] = []
        while self._calls:
            updates += self._calls.popleft()(now)
        for event in events:
            updates += self._core.on_event(event, now)
            updates += self._models.on_event(event, now)
            _log(event)
        return updates + self._core.on_time(now)

    def _hand_out(self, now: float) -> None:
        if self._core.ranks.any_down:
            self._cluster.load_first(self._core.most_wanted())
        for kv_rank, sequence_ids in self._core.take_forgotten().items():
            self._cluster.forget(kv_rank, sequence_ids)
        self._models.remove_drained()  # after its last sequences: pages that have users wait for every running step
        self._submit(self._core.schedule(now))
        self._submit(self._core.schedule_ahead(now))
        for kv_rank, hints in self._core.mapping_hints(now).items():
            self._cluster.map_ahead(kv_rank, hints)

    def _submit(self, steps: Items[StepDescriptor]) -> None:
        for kv_rank, copies in self._core.take_copies().items():
            self._cluster.copy_frames(kv_rank, copies)
        for step in steps:
            self._cluster.submit(step)

    def _end_request(self, request_id: str, now: float) -> list[SequenceUpdate]:
        ids = self._callers.sequences_of(request_id)
        updates = [self._core.end_sequence(sequence_id, FinishReason.ABORT, now) for sequence_id in ids]
        return [update for update in updates if update is not None]

    def _end_all(self, error: CrossPoolError) -> None:
        """The thread's last act: everybody who waits gets `error`."""
        with self._lock:
            outputs = self._callers.end_all(error, self._clock())
            self._ended.notify_all()
            self._models.give_up(error)
        deliver(outputs, self.abort)

    def _expand(self, request: GenerationRequest, model: ServedModel, now: float) -> list[Request]:
        """The request's sequences, with what it leaves open: a seed and a deadline."""
        seed = request.seed if request.seed is not None else self.config.seed
        if seed is None:
            seed = int.from_bytes(os.urandom(8), "little") & MAX_SEED
        timeout_s = request.timeout_s if request.timeout_s is not None else self.config.default_deadline_s
        deadline_s = None if timeout_s is None else now + timeout_s
        return sequences(request, model, seed=seed, arrival_s=now, deadline_s=deadline_s)

    def _load(self, model: ServedModel) -> list[SequenceUpdate]:
        self._models.load(model)
        return []


def _log(event: Event) -> None:
    """What the cluster, which logs losses and returns, does not."""
    if isinstance(event, RankFailed):
        logger.error("rank %s stays lost: %s", event.rank, event.error)
