"""Fields that are known and not offered, or that contradict each other: refused by name, never silently ignored."""

import logging
from typing import Any

from crosspool.server.errors import APIError, bad_request, shorten
from crosspool.server.protocol import ChatBody, CompletionBody, GenerationBody

logger = logging.getLogger(__name__)

# OpenAI's and vLLM's fields that would change the answer, so that dropping them would be a silent wrong answer.
NOT_OFFERED = (
    "audio",
    "beam_width",
    "continue_final_message",
    "documents",
    "function_call",
    "functions",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "length_penalty",
    "logits_processors",
    "mm_processor_kwargs",
    "prediction",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "use_beam_search",
    "web_search_options",
)
HARMLESS: tuple[Any, ...] = (None, False, "", "none", [], {})
MAX_LOGGED_FIELDS = 20


def refuse_unsupported(body: GenerationBody) -> None:
    """Raise APIError for the first field that cannot be honoured; log the fields that nobody knows."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is only taken with stream: true", param="stream_options")
    if body.min_tokens and body.max_new_tokens is not None and body.min_tokens > body.max_new_tokens:
        raise bad_request(
            f"min_tokens is {body.min_tokens}, more than max_tokens {body.max_new_tokens}", param="min_tokens"
        )
    if isinstance(body, CompletionBody):
        _completion(body)
    elif isinstance(body, ChatBody):
        _chat(body)
    extra = body.model_extra or {}
    for name in NOT_OFFERED if extra else ():
        value = extra.get(name)
        if not (isinstance(value, bool | str | list | dict | None) and value in HARMLESS):
            raise _not_offered(name)
    if extra:
        shown = shorten(", ".join(shorten(name, 40) for name in body.unknown_fields[:MAX_LOGGED_FIELDS]), 400)
        logger.warning("ignored %d unknown field(s): %s", len(extra), ascii(shown))


def _completion(body: CompletionBody) -> None:
    if body.echo:
        raise _not_offered("echo")
    if body.suffix:
        raise _not_offered("suffix")
    if body.best_of is not None and body.best_of != body.n:
        raise bad_request(f"best_of other than n ({body.n}) is not offered; leave it out", param="best_of")


def _chat(body: ChatBody) -> None:
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs is only taken with logprobs: true", param="top_logprobs")
    modalities: Any = (body.model_extra or {}).get("modalities")
    if modalities not in (None, ["text"]):
        raise _not_offered("modalities", 'only ["text"] is taken')


def _not_offered(name: str, remedy: str = "leave it out") -> APIError:
    return bad_request(f"{name} is not offered by this server; {remedy}", param=name, code="unsupported_parameter")
