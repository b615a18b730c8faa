"""Choices as the two endpoints write them: text and log-probabilities, whole or in pieces."""

from collections.abc import Sequence
from typing import Any, Protocol

from crosspool.engine.output import RequestOutput, TokenLogprobs
from crosspool.server.tokenizer import TextTokenizer

Json = dict[str, Any]

FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""


class AnswerShape(Protocol):
    """How one endpoint writes its choices."""

    whole_object: str
    piece_object: str
    id_prefix: str

    def opening(self, index: int) -> Json | None:
        """The choice that opens a stream, before any text."""
        ...

    def piece(self, index: int, output: RequestOutput) -> Json | None:
        """The choice for one output of a stream; None where it shows nothing."""
        ...

    def whole(self, index: int, outputs: Sequence[RequestOutput]) -> Json:
        """The choice of a plain answer, from every output of its sequence."""
        ...


class ChatShape:
    """`message` and `delta`; log-probabilities as a list of tokens."""

    whole_object = "chat.completion"
    piece_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, index: int) -> Json | None:
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def piece(self, index: int, output: RequestOutput) -> Json | None:
        if _shows_nothing(output):
            return None
        delta = {"content": output.text} if output.text or output.finish_reason is None else {}
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(output.logprobs),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def whole(self, index: int, outputs: Sequence[RequestOutput]) -> Json:
        last = outputs[-1]
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(output.text for output in outputs), "refusal": None},
            "logprobs": self._logprobs(_joined(outputs)),
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> Json | None:
        if logprobs is None:
            return None
        content = [
            {
                **self._token(item.token_id, item.logprob),
                "top_logprobs": [self._token(top.token_id, top.logprob) for top in item.top],
            }
            for item in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": floored(logprob), "bytes": list(raw)}


class CompletionShape:
    """`text`; log-probabilities as parallel lists, `text_offset` in characters of the answer."""

    whole_object = "text_completion"
    piece_object = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> Json | None:
        return None

    def piece(self, index: int, output: RequestOutput) -> Json | None:
        if _shows_nothing(output):
            return None
        return self._choice(index, output.text, output.logprobs, output)

    def whole(self, index: int, outputs: Sequence[RequestOutput]) -> Json:
        return self._choice(index, "".join(output.text for output in outputs), _joined(outputs), outputs[-1])

    def _choice(self, index: int, text: str, logprobs: Sequence[TokenLogprobs] | None, last: RequestOutput) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, logprobs),
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprobs] | None) -> Json | None:
        if logprobs is None:
            return None
        offset = self._offsets.get(index, 0)
        tokens, offsets = [], []
        for item in logprobs:
            tokens.append(self._tokenizer.token_text(item.token_id))
            offsets.append(offset)
            offset += len(tokens[-1])
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [floored(item.logprob) for item in logprobs],
            "top_logprobs": [self._top(item) for item in logprobs],
            "text_offset": offsets,
        }

    def _top(self, item: TokenLogprobs) -> dict[str, float]:
        """By token text; of tokens with the same text the likeliest stays."""
        found: dict[str, float] = {}
        for top in item.top:
            found.setdefault(self._tokenizer.token_text(top.token_id), floored(top.logprob))
        return found


def floored(logprob: float) -> float:
    """`logprob`, at least FLOOR; FLOOR for NaN too."""
    return logprob if logprob >= FLOOR else FLOOR


def usage_json(prompts: Sequence[Sequence[RequestOutput]]) -> Json:
    """Totals over the last outputs of every sequence, by prompt; a prompt counts once, whatever n is."""
    prompt_tokens = sum(outputs[0].usage.prompt_tokens for outputs in prompts if outputs)
    cached = sum(outputs[0].usage.cached_tokens for outputs in prompts if outputs)
    completion_tokens = sum(output.usage.completion_tokens for outputs in prompts for output in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _joined(outputs: Sequence[RequestOutput]) -> list[TokenLogprobs] | None:
    if all(output.logprobs is None for output in outputs):
        return None
    return [item for output in outputs for item in output.logprobs or ()]


def _shows_nothing(output: RequestOutput) -> bool:
    return not output.text and not output.logprobs and output.finish_reason is None
