"""OutputBuilder: turns the updates of one sequence into the outputs its caller sees."""

from crosspool.core import FinishReason, SampledToken
from crosspool.engine.detokenizer import Detokenizer
from crosspool.engine.output import RequestOutput, Timings, TokenLogprobs, Usage
from crosspool.engine.request import GenerationRequest
from crosspool.engine.sequence import SequenceUpdate
from crosspool.errors import CrossPoolError


class OutputBuilder:
    """Text, usage and times of sequence `index` of a request. Pure: time comes with the updates.

    detokenizer: None for a model without a tokenizer; outputs then carry ids alone.
    """

    def __init__(
        self, request: GenerationRequest, index: int, detokenizer: Detokenizer | None, arrival_s: float
    ) -> None:
        self._request = request
        self._index = index
        self.watches_stop_strings = bool(request.stop) and detokenizer is not None
        self._detokenizer = detokenizer
        self._arrival_s = arrival_s
        self._scheduled_s: float | None = None
        self._cached_tokens = 0
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self._num_tokens = 0
        self._pending: list[tuple[SampledToken, float]] = []  # tokens whose text is held back

    def on_update(self, update: SequenceUpdate) -> RequestOutput | None:
        """The output this update makes, or None while its text is held back.

        An output that ends with a stop string has `finish_reason` STOP though the update has none: the caller then
        ends the sequence.
        """
        if update.scheduled_s is not None:
            self._scheduled_s, self._cached_tokens = update.scheduled_s, update.cached_tokens
        text, stop = "", None
        reason = update.finish_reason
        if update.token is not None:
            text, stop = self._take(update.token, update.time_s, reason)
        stop_reason: str | int | None = None
        if stop is None and reason is not None and self._detokenizer is not None:
            rest = self._detokenizer.finish()
            text, stop = text + rest.text, rest.stop
        if stop is not None:
            reason, stop_reason = FinishReason.STOP, stop
        elif reason is FinishReason.STOP and update.token is not None:
            stop_reason = update.token.token_id
        if reason is None and self._detokenizer is not None and self._detokenizer.holds_back:
            return self._output(text, release=False) if text else None
        return self._output(text, reason=reason, stop_reason=stop_reason, error=update.error)

    def fail(self, error: CrossPoolError) -> RequestOutput:
        """The last output of a sequence that ends with `error`; text held back is dropped."""
        return self._output("", reason=FinishReason.ERROR, error=error)

    def _take(self, token: SampledToken, now: float, reason: FinishReason | None) -> tuple[str, str | None]:
        """Count one token; its text and the stop string it completed. An end token has no text."""
        self._num_tokens += 1
        self._pending.append((token, now))
        self._last_token_s = now
        if self._first_token_s is None:
            self._first_token_s = now
        is_hidden_end = reason is FinishReason.STOP and not self._request.include_stop_str_in_output
        if self._detokenizer is None or is_hidden_end:
            return "", None
        piece = self._detokenizer.feed(token.token_id)
        return piece.text, piece.stop

    def _output(
        self,
        text: str,
        *,
        release: bool = True,
        reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
        error: CrossPoolError | None = None,
    ) -> RequestOutput:
        tokens = self._pending if release else []
        if release:
            self._pending = []
        logprobs = None
        if self._request.sampling.num_logprobs is not None:
            logprobs = tuple(_logprobs(token) for token, _ in tokens)
        return RequestOutput(
            request_id=self._request.request_id,
            index=self._index,
            text=text,
            token_ids=tuple([token.token_id for token, _ in tokens]),
            token_times_s=tuple([time_s for _, time_s in tokens]),
            logprobs=logprobs,
            usage=Usage(
                prompt_tokens=len(self._request.prompt_token_ids),
                completion_tokens=self._num_tokens,
                cached_tokens=self._cached_tokens,
            ),
            timings=Timings(
                arrival_s=self._arrival_s,
                scheduled_s=self._scheduled_s,
                first_token_s=self._first_token_s,
                last_token_s=self._last_token_s,
            ),
            finish_reason=reason,
            stop_reason=stop_reason,
            error=error,
        )


def _logprobs(token: SampledToken) -> TokenLogprobs:
    assert token.logprob is not None, f"sequence {token.sequence_id} asked for logprobs and its worker gave none"
    return TokenLogprobs(token.token_id, token.logprob, token.top_logprobs)
