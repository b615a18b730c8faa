"""Prompts of a request to token ids, off the event loop where that takes long."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from crosspool.server.catalogue import ModelFrontend
from crosspool.server.chat import TemplateError
from crosspool.server.errors import bad_request, shorten
from crosspool.server.protocol import ChatBody, CompletionBody
from crosspool.server.tokenizer import LONG_TEXT
from crosspool.server.tools import ToolUse

T = TypeVar("T")


async def chat_prompt(body: ChatBody, model: ModelFrontend, use: ToolUse) -> list[int]:
    """Token ids of conversation and tools, through the model's template. Raises APIError (400) where it refuses."""
    template = model.template
    if template is None:
        raise bad_request(
            f"the model {model.name} has no chat template; use /v1/completions, or serve it with --chat-template FILE",
            param="messages",
            code="no_chat_template",
        )

    kwargs = dict(body.chat_template_kwargs)
    if use.given:
        kwargs["tools"] = list(use.given)
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)

    def build() -> list[int]:
        return template.prompt_ids(body.messages, add_generation_prompt=body.add_generation_prompt, kwargs=kwargs)

    length = sum(len(message.get("content") or "") for message in body.messages)
    try:
        ids = await off_loop(build, length)
    except TemplateError as error:
        raise bad_request(shorten(str(error), 1000), param="messages", code="chat_template_error") from None
    except RecursionError:
        raise bad_request("messages are nested too deeply", param="messages") from None
    return _not_empty(ids, model, "messages")


async def completion_prompts(body: CompletionBody, model: ModelFrontend) -> list[list[int]]:
    """Token ids of each prompt. Raises APIError (400) for empty ones and for ids outside the vocabulary."""
    return [await _completion_prompt(prompt, body, model) for prompt in body.prompt]


async def _completion_prompt(prompt: str | Sequence[int], body: CompletionBody, model: ModelFrontend) -> list[int]:
    if isinstance(prompt, str):

        def encode() -> list[int]:
            return model.tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens)

        return _not_empty(await off_loop(encode, len(prompt)), model, "prompt")
    for token_id in prompt:
        if not 0 <= token_id < model.vocab_size:
            raise bad_request(
                f"prompt holds the token id {token_id}; ids of {model.name} lie between 0 and {model.vocab_size - 1}",
                param="prompt",
            )
    return _not_empty(list(prompt), model, "prompt")


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
