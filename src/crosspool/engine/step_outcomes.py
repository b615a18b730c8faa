"""StepOutcomes: what a step that ended, went on with its run, or failed means for the sequences of its rows."""

from crosspool.cluster.base import StepFailed
from crosspool.core import SampledToken
from crosspool.engine.dispatcher import Dispatcher
from crosspool.engine.endings import Endings
from crosspool.engine.lanes import Flight, Trouble
from crosspool.engine.live_models import LiveModels
from crosspool.engine.sequence import Sequence, SequenceState, SequenceUpdate
from crosspool.engine.step_log import StepLog
from crosspool.errors import ConstraintError, StepError, WorkerLostError
from crosspool.scheduler.step import StepResult


class StepOutcomes:
    """Appends tokens, ends sequences, and parks steps that failed. Outcomes of steps given up before are ignored."""

    def __init__(
        self, models: LiveModels, dispatcher: Dispatcher, endings: Endings, log: StepLog, recovery_timeout_s: float
    ) -> None:
        self._live_models, self._kv = models.by_name, models.kv
        self._dispatcher = dispatcher
        self._endings = endings
        self._log = log
        self._recovery_timeout_s = recovery_timeout_s

    def done(self, result: StepResult, now: float) -> list[SequenceUpdate]:
        """A step ended, or the last one of a run."""
        flight = self._dispatcher.ended(result.lane, result.step_seq, now)
        if flight is None:
            return []
        self._log.add(flight.step.header, flight.started_s, now, result, 1 + flight.num_told)
        self._endings.release_unused(flight.sequences)
        return self._take_in(flight, result.sampled, now)

    def told(self, lane: int, step_seq: int, sampled: tuple[SampledToken, ...], now: float) -> list[SequenceUpdate]:
        """A step of a run ended, and the run goes on."""
        flight = self._dispatcher.told(lane, step_seq)
        return [] if flight is None else self._take_in(flight, sampled, now)

    def failed(self, event: StepFailed, now: float) -> list[SequenceUpdate]:
        """Park the step for a replay; one in which a worker raised goes on row by row, and a lone row ends."""
        flight, behind = self._dispatcher.failed(event.lane, event.step_seq, now)
        self._endings.release_unused(dict.fromkeys((*(() if flight is None else flight.sequences), *behind)))
        if flight is None:
            return []
        trouble = flight.trouble or Trouble(now, 0, event.error)
        trouble.num_failures += 1
        trouble.error = event.error
        step, sequences = flight.step.advanced(flight.num_told), flight.sequences
        alive = [sequence for sequence in sequences if sequence.state is not SequenceState.ENDED]
        if event.fatal:
            if len(sequences) == 1:
                return self._endings.fail_all(alive, StepError(event.error), now)
            self._dispatcher.parked_steps.isolate(step, sequences, trouble, now)
            return []
        if self._recovery_timeout_s == 0:
            return self._endings.fail_all(alive, WorkerLostError(trouble.describe(self._recovery_timeout_s)), now)
        if alive:
            self._dispatcher.parked_steps.park(step, sequences, trouble, now)
        return []

    def _take_in(self, flight: Flight, tokens: tuple[SampledToken, ...], now: float) -> list[SequenceUpdate]:
        """What a step, or a step of a run, did for those of its sequences that have not ended."""
        sampled = {token.sequence_id: token for token in tokens}
        updates = []
        for row, sequence in zip(flight.step.rows, flight.sequences, strict=True):
            if sequence.state is SequenceState.ENDED:
                continue
            sequence.num_cached_tokens += row.num_new_tokens
            self._kv.of(sequence).step_ended(sequence)
            if row.sample:
                updates.append(self._accept_token(sequence, sampled[row.sequence_id], now))
        return updates

    def _accept_token(self, sequence: Sequence, token: SampledToken, now: float) -> SequenceUpdate:
        live = self._live_models[sequence.request.model]
        if sequence.state is SequenceState.PREFILLING:
            live.prompt_tokens += sequence.num_prompt_tokens if sequence.num_generated_tokens == 0 else 0
            live.enter(sequence, SequenceState.DECODING)
        sequence.request.output_token_ids.append(token.token_id)
        sequence.num_losses = 0
        live.generated_tokens += 1
        reason = sequence.end_after(token.token_id)
        if reason is not None:
            self._endings.end(sequence, reason)
        elif sequence.request.constraint is not None:
            try:
                sequence.request.constraint.advance(token.token_id)
            except ConstraintError as error:
                return self._endings.fail(sequence, error, now)
        return SequenceUpdate.of(sequence, now, token=token, finish_reason=reason)
