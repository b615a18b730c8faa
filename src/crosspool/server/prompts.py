"""Prompts of a request to token ids, off the event loop where that takes long, and refused before that takes too long.

`limit` is the model's context limit in tokens. None: the tokens are only counted, of MAX_CHARACTERS at most.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from crosspool.server.catalogue import ModelFrontend
from crosspool.server.chat import TemplateError
from crosspool.server.errors import ContextRefusal, bad_request, shorten
from crosspool.server.messages import Message
from crosspool.server.protocol import ChatBody, CompletionBody
from crosspool.server.sampling import check_ids
from crosspool.server.tokenizer import LONG_TEXT, TooLongError
from crosspool.server.tools import ToolUse

T = TypeVar("T")

MAX_CHARACTERS = 1 << 20


async def chat_prompt(body: ChatBody, model: ModelFrontend, use: ToolUse, limit: int | None) -> list[int]:
    """Token ids of conversation and tools, through the model's template. Raises APIError (400) where it refuses."""
    template = model.template
    if template is None:
        raise bad_request(
            f"the model {model.name} has no chat template; use /v1/completions, or serve it with --chat-template FILE",
            param="messages",
            code="no_chat_template",
        )
    num_characters = _require_room([_shown(message) for message in body.messages], model, limit, "messages")
    kwargs = dict(body.chat_template_kwargs)
    if use.given:
        kwargs["tools"] = list(use.given)
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)

    def build() -> list[int]:
        return template.prompt_ids(
            body.messages, add_generation_prompt=body.add_generation_prompt, kwargs=kwargs, limit=limit
        )

    try:
        ids = await off_loop(build, num_characters)
    except TemplateError as error:
        raise bad_request(shorten(str(error), 1000), param="messages", code="chat_template_error") from None
    except RecursionError:
        raise bad_request("messages are nested too deeply", param="messages") from None
    except TooLongError as error:
        raise _too_long(limit, "messages", str(error)) from None
    return _not_empty(ids, model, "messages")


async def completion_prompts(body: CompletionBody, model: ModelFrontend, limit: int) -> list[list[int]]:
    """Token ids of each prompt. Raises APIError (400) for empty ones and for ids outside the vocabulary."""
    return [await _completion_prompt(prompt, body, model, limit) for prompt in body.prompt]


async def text_ids(text: str, model: ModelFrontend, limit: int | None, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a prompt. Raises APIError (400) for one that is too long."""

    def encode() -> list[int]:
        return model.tokenizer.encode(text, add_special_tokens=add_special_tokens, limit=limit)

    num_characters = _require_room([text], model, limit, "prompt")
    try:
        return await off_loop(encode, num_characters)
    except TooLongError as error:
        raise _too_long(limit, "prompt", str(error)) from None


async def _completion_prompt(
    prompt: str | Sequence[int], body: CompletionBody, model: ModelFrontend, limit: int
) -> list[int]:
    if isinstance(prompt, str):
        ids = await text_ids(prompt, model, limit, add_special_tokens=body.add_special_tokens)
        return _not_empty(ids, model, "prompt")
    check_ids((min(prompt, default=0), max(prompt, default=0)), "prompt", model)
    return _not_empty(list(prompt), model, "prompt")


def _require_room(texts: Sequence[str], model: ModelFrontend, limit: int | None, param: str) -> int:
    """Characters of the prompt. Raises APIError (400) where they certainly have more tokens than there may be."""
    num_characters = sum(map(len, texts))
    if limit is None:
        if num_characters > MAX_CHARACTERS:
            raise bad_request(
                f"{param} has {num_characters} characters; tokens of at most {MAX_CHARACTERS} are counted", param=param
            )
    elif num_characters >= limit and (least := model.tokenizer.bound.least_tokens(texts)) >= limit:
        raise _too_long(limit, param, f"{num_characters} characters, which are at least {least} tokens")
    return num_characters


def _too_long(limit: int | None, param: str, what: str) -> ContextRefusal:
    return ContextRefusal(f"the context limit is {limit} tokens; {param} has {what}; shorten the prompt", param=param)


def _shown(message: Message) -> str:
    """The part of a message's text that no template leaves out."""
    content: str = message.get("content") or ""
    return content.rsplit("</think>", 1)[-1] if message["role"] == "assistant" else content


def _not_empty(ids: list[int], model: ModelFrontend, param: str) -> list[int]:
    """An empty prompt begins at the begin token where the model has one; else there is nothing to go on from."""
    if ids:
        return ids
    if model.tokenizer.bos_token_id is not None:
        return [model.tokenizer.bos_token_id]
    raise bad_request(f"{param} has no tokens and {model.name} has no begin token; send some text", param=param)


async def off_loop(work: Callable[[], T], num_characters: int) -> T:
    """`work` on a text of that length: in a thread where it takes long."""
    return await asyncio.to_thread(work) if num_characters >= LONG_TEXT else work()
