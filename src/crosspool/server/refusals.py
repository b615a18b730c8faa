"""Fields that are known and not offered, or that contradict each other: refused by name, never silently ignored."""

import logging
from typing import Any

from crosspool.server.errors import APIError, bad_request, shorten
from crosspool.server.protocol import ChatBody, CompletionBody, GenerationBody, RequestBody

logger = logging.getLogger(__name__)

LEAVE_OUT = "leave it out"
FORM = "say the answer's form in structured_outputs"

# Fields of OpenAI, Anthropic, vLLM and SGLang that would change the answer, so that to drop them would be a wrong
# answer; and what to do instead.
NOT_OFFERED = {
    "allowed_token_ids": "bind the answer with structured_outputs or logit_bias",
    "audio": LEAVE_OUT,
    "bad_words": "use logit_bias",
    "beam_width": LEAVE_OUT,
    "chat_template": "the model's own is used; chat_template_kwargs reach it",
    "continue_final_message": "use /v1/completions",
    "documents": "write them into a message",
    "ebnf": FORM,
    "echo": LEAVE_OUT,
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_choice": FORM,
    "guided_grammar": FORM,
    "guided_json": FORM,
    "guided_regex": FORM,
    "json_schema": FORM,
    "length_penalty": LEAVE_OUT,
    "logits_processors": LEAVE_OUT,
    "mcp_servers": LEAVE_OUT,
    "mm_processor_kwargs": LEAVE_OUT,
    "prediction": LEAVE_OUT,
    "prompt_embeds": LEAVE_OUT,
    "prompt_logprobs": LEAVE_OUT,
    "regex": FORM,
    "return_token_ids": "ask /tokenize for the ids of a text",
    "return_tokens_as_token_ids": "ask /tokenize for the ids of a text",
    "truncate_prompt_tokens": LEAVE_OUT,
    "use_beam_search": LEAVE_OUT,
    "web_search_options": LEAVE_OUT,
}
# What says nothing about the answer: bookkeeping of the hosted services.
WITHOUT_EFFECT = frozenset(
    ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user")
)
HARMLESS: tuple[Any, ...] = (None, False, "", "none", [], {})
MAX_LOGGED_FIELDS = 20

_CHAT = {
    name: field.get_default(call_default_factory=True)
    for name, field in ChatBody.model_fields.items()
    if name not in {*WITHOUT_EFFECT, "stream_options", "tool_choice"}
} | {"parallel_tool_calls": True}
"""What changes an answer of the route with most fields, each with the value that means nothing; elsewhere to drop one
would be a wrong answer too."""


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
    refuse_extra(body)


def refuse_extra(body: RequestBody) -> None:
    """The same of the fields that a body of any API does not declare."""
    extra = body.model_extra
    if not extra:
        return
    for name in sorted(extra.keys() & (body.other_names.keys() | _CHAT.keys())):
        there = body.other_names.get(name)
        if extra[name] not in (_CHAT.get(name), getattr(body, there or "", None)):
            remedy = f"send {there}" if there else "/v1/chat/completions takes it; ask there, or leave it out"
            raise bad_request(
                f"{name} is not taken here; {remedy}", param=name, code="unsupported_parameter", is_verbatim=True
            )
    for name in sorted(extra.keys() & NOT_OFFERED.keys()):
        value = extra[name]
        if not (isinstance(value, bool | str | list | dict | None) and value in HARMLESS):
            raise _not_offered(name, NOT_OFFERED[name])
    unknown = sorted(extra.keys() - WITHOUT_EFFECT)
    if unknown:
        shown = shorten(", ".join(shorten(name, 40) for name in unknown[:MAX_LOGGED_FIELDS]), 400)
        logger.warning("ignored %d unknown field(s): %s", len(unknown), ascii(shown))


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


def _not_offered(name: str, remedy: str = LEAVE_OUT) -> APIError:
    return bad_request(f"{name} is not offered by this server; {remedy}", param=name, code="unsupported_parameter")
