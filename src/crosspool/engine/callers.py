"""Callers: the way back of every accepted sequence, from the core's updates to outputs in its caller's sink."""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from crosspool.core import FinishReason
from crosspool.engine.output import RequestOutput
from crosspool.engine.output_builder import OutputBuilder
from crosspool.engine.sequence import SequenceUpdate
from crosspool.errors import CrossPoolError, StepError

logger = logging.getLogger(__name__)

Sink = Callable[[RequestOutput], None]
"""Takes a request's outputs on the engine thread: it must return at once and not raise."""

Flush = Callable[[], None]
"""Called on the engine thread once after a step's outputs, however many of its callers' sinks took one."""

EndSequence = Callable[[int, FinishReason, float], SequenceUpdate | None]
"""Ends a sequence in the core: what its caller's side finds out first, such as a stop string."""


@dataclass(slots=True)
class Caller:
    """Who waits for one sequence. builder: makes its outputs."""

    request_id: str
    sink: Sink
    flush: Flush | None
    builder: OutputBuilder


Delivery = tuple[Caller, RequestOutput]


class Callers:
    """Callers by sequence and request. Everything but `deliver` runs under the engine's lock."""

    def __init__(self, end_sequence: EndSequence) -> None:
        self._end_sequence = end_sequence
        self._by_sequence: dict[int, Caller] = {}
        self._by_request: dict[str, list[int]] = {}

    def __len__(self) -> int:
        """Sequences that somebody waits for."""
        return len(self._by_sequence)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    def add(
        self,
        request_id: str,
        sequence_ids: list[int],
        builders: Items[OutputBuilder],
        sink: Sink,
        flush: Flush | None,
    ) -> None:
        self._by_request[request_id] = sequence_ids
        for sequence_id, builder in zip(sequence_ids, builders, strict=True):
            self._by_sequence[sequence_id] = Caller(request_id, sink, flush, builder)

    def sequences_of(self, request_id: str) -> tuple[int, ...]:
        """Those that have not ended; none of a request that is not running."""
        return tuple(self._by_request.get(request_id, ()))

    def watches_stop_strings(self, update: SequenceUpdate) -> bool:
        """Whether the update's text may end its sequence."""
        return self._by_sequence[update.sequence_id].builder.watches_stop_strings

    def make_outputs(self, updates: Items[SequenceUpdate], outputs: list[Delivery], now: float) -> None:
        """Append what the updates give. A sequence that ends in one of them is forgotten with it."""
        for update in updates:
            caller = self._by_sequence.get(update.sequence_id)
            if caller is None:
                continue  # its last token completed a stop string, and something else ended it at the same moment
            try:
                output = caller.builder.on_update(update)
            except Exception as cause:  # of the tokenizer, on this sequence's ids: the others go on
                logger.exception("the text of request %s cannot be made", caller.request_id)
                self._end_sequence(update.sequence_id, FinishReason.ERROR, now)
                output = caller.builder.fail(StepError(f"the output cannot be made into text: {cause}"))
            if output is None:
                continue
            outputs.append((caller, output))
            if output.finish_reason is not None:
                if update.finish_reason is None:  # a stop string, which the core does not know of
                    self._end_sequence(update.sequence_id, FinishReason.STOP, now)
                self._forget(update.sequence_id)

    def end_all(self, error: CrossPoolError, now: float) -> list[Delivery]:
        """The last output of every sequence, which ends with `error`; all are forgotten."""
        outputs: list[Delivery] = []
        for sequence_id, caller in self._by_sequence.items():
            ended = SequenceUpdate(
                sequence_id=sequence_id, time_s=now, scheduled_s=None, finish_reason=FinishReason.ERROR, error=error
            )
            output = caller.builder.on_update(ended)
            assert output is not None
            outputs.append((caller, output))
        self._by_sequence.clear()
        self._by_request.clear()
        return outputs

    def _forget(self, sequence_id: int) -> None:
        request_id = self._by_sequence.pop(sequence_id).request_id
        ids = self._by_request[request_id]
        ids.remove(sequence_id)
        if not ids:
            del self._by_request[request_id]


def deliver(outputs: Items[Delivery], abort: Callable[[str], object]) -> None:
    """Hand outputs to their sinks, then flush. A request whose sink raises is aborted by `abort`."""
    flushes: dict[Flush, None] = {}
    for caller, output in outputs:
        try:
            caller.sink(output)
        except Exception:  # one caller's bug is not the others' end
            logger.exception("the sink of request %s raised; the request is aborted", output.request_id)
            abort(output.request_id)
        if caller.flush is not None:
            flushes[caller.flush] = None
    for flush in flushes:
        flush()
