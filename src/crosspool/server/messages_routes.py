"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API over the same models."""

import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from crosspool.server.choices import Json
from crosspool.server.errors import MESSAGES_PATH, APIError
from crosspool.server.generation_routes import ERRORS
from crosspool.server.messages_answer import MessageBlocks, usage
from crosspool.server.messages_body import CountBody, MessagesBody
from crosspool.server.outputs import OutputGroup
from crosspool.server.preparation import chat_answer
from crosspool.server.prompts import chat_prompt
from crosspool.server.stream import EventStream, event, unless_left
from crosspool.server.tools import tool_use

router = APIRouter(tags=["messages"])

PING = event({"type": "ping"})


class MessageErrorDetail(BaseModel):
    """What went wrong."""

    type: str
    message: str


class MessageError(BaseModel):
    """The body of every answer of these routes that is not a success."""

    type: str
    error: MessageErrorDetail
    request_id: str


MESSAGE_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**found, "model": MessageError} if "model" in found else found for status, found in ERRORS.items()
}


class InputTokens(BaseModel):
    """Tokens of the prompt."""

    input_tokens: int


@router.post(MESSAGES_PATH, summary="Answer a conversation (Anthropic)", responses=MESSAGE_ERRORS, response_model=None)
async def messages(body: MessagesBody, request: Request) -> Response:
    message_id = f"msg_{uuid.uuid4().hex}"
    answer = await chat_answer(body.chat(), request, message_id)
    blocks, num_tokens = MessageBlocks(answer.parser), len(answer.plan.prompt)
    head: Json = {"id": message_id, "type": "message", "role": "assistant", "model": answer.model.name}
    if body.stream:
        keep_alive_s = request.app.state.config.sse_keep_alive_s
        return EventStream(_events(answer.group, blocks, head, num_tokens, keep_alive_s))
    for _, output in await unless_left(request, answer.group.whole()):
        blocks.add(output)
    reason, sequence = blocks.stop
    found = {**head, "content": blocks.blocks, "stop_reason": reason, "stop_sequence": sequence}
    return JSONResponse({**found, "usage": usage(blocks.last, num_tokens)})


@router.post(f"{MESSAGES_PATH}/count_tokens", summary="Tokens of a prompt (Anthropic)", responses=MESSAGE_ERRORS)
async def count_tokens(body: CountBody, request: Request) -> InputTokens:
    chat = body.chat()
    model = request.app.state.catalogue.resolve(chat.model)
    return InputTokens(input_tokens=len(await unless_left(request, chat_prompt(chat, model, tool_use(chat), None))))


async def _events(
    group: OutputGroup, blocks: MessageBlocks, head: Json, prompt_tokens: int, keep_alive_s: float
) -> AsyncGenerator[bytes, None]:
    """The events of one answer. A failure after the first is one error event. Closes the group however it ends."""
    opening = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage(None, prompt_tokens)}
    try:
        batch = await group.next(timeout_s=keep_alive_s)
        try:
            yield event({"type": "message_start", "message": opening})
            while batch is not None:
                found = [event(item) for _, output in batch for item in blocks.add(output)]
                if found:
                    yield b"".join(found)
                elif not batch:
                    yield PING
                batch = await group.next(timeout_s=keep_alive_s)
            reason, sequence = blocks.stop
            delta = {"stop_reason": reason, "stop_sequence": sequence}
            yield event({"type": "message_delta", "delta": delta, "usage": usage(blocks.last, prompt_tokens)})
            yield event({"type": "message_stop"})
        except APIError as error:
            yield event(error.message_body())
    finally:
        await group.close()
