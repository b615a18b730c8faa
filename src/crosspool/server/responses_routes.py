"""POST /v1/responses: OpenAI's Responses API without anything kept between requests."""

import time
import uuid
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from crosspool.server.choices import Json
from crosspool.server.errors import APIError
from crosspool.server.generation_routes import ERRORS
from crosspool.server.outputs import OutputGroup
from crosspool.server.preparation import chat_answer
from crosspool.server.responses_answer import ResponseItems, usage
from crosspool.server.responses_body import ResponsesBody
from crosspool.server.stream import KEEP_ALIVE, EventStream, event, unless_left

router = APIRouter(tags=["responses"])


@router.post("/v1/responses", summary="Answer, as output items", responses=ERRORS, response_model=None)
async def responses(body: ResponsesBody, request: Request) -> Response:
    response_id = f"resp_{uuid.uuid4().hex}"
    answer = await chat_answer(body.chat(), request, response_id)
    items, sampling = ResponseItems(answer.parser), answer.asked.sampling
    head: Json = {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": answer.model.name,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": sampling.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools,
        "top_p": sampling.top_p,
    }
    if body.stream:
        return EventStream(_events(answer.group, items, head, request.app.state.config.sse_keep_alive_s))
    for _, output in await unless_left(request, answer.group.whole()):
        items.add(output)
    return JSONResponse(_response(head, items))


def _response(head: Json, items: ResponseItems, *, error: APIError | None = None) -> Json:
    """The response as it stands after the last output."""
    status = "failed" if error is not None else "incomplete" if items.is_cut else "completed"
    return {
        **head,
        "status": status,
        "error": None if error is None else {"code": "server_error", "message": error.message},
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": items.items,
        "usage": usage(items.last),
    }


async def _events(
    group: OutputGroup, items: ResponseItems, head: Json, keep_alive_s: float
) -> AsyncGenerator[bytes, None]:
    """The events of one answer; the last one holds all of it. Closes the group however it ends."""
    number = 0

    def numbered(body: Json) -> bytes:
        nonlocal number
        number += 1
        return event({**body, "sequence_number": number - 1})

    opening = {**head, "status": "in_progress", "error": None, "incomplete_details": None, "output": [], "usage": None}
    try:
        batch = await group.next(timeout_s=keep_alive_s)
        try:
            yield numbered({"type": "response.created", "response": opening})
            yield numbered({"type": "response.in_progress", "response": opening})
            while batch is not None:
                found = [numbered(item) for _, output in batch for item in items.add(output)]
                if found:
                    yield b"".join(found)
                elif not batch:
                    yield KEEP_ALIVE
                batch = await group.next(timeout_s=keep_alive_s)
            whole = _response(head, items)
            yield numbered({"type": f"response.{whole['status']}", "response": whole})
        except APIError as error:
            items.fail()
            yield numbered({"type": "response.failed", "response": _response(head, items, error=error)})
    finally:
        await group.close()
