"""POST /v1/chat/completions and /v1/completions: from a checked body to one JSON answer or a stream of events."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from crosspool.core import TokenConstraint
from crosspool.engine.output import RequestOutput
from crosspool.engine.request import GenerationRequest
from crosspool.server.catalogue import ModelFrontend
from crosspool.server.choices import AnswerShape, CompletionShape, Json, usage_json
from crosspool.server.engine_client import info_of
from crosspool.server.errors import ErrorBody
from crosspool.server.outputs import open_group
from crosspool.server.preparation import planned_chat, prepare
from crosspool.server.prompts import completion_prompts
from crosspool.server.protocol import ChatBody, CompletionBody, GenerationBody
from crosspool.server.sampling import generation_request
from crosspool.server.stream import EventStream, answer_events, by_prompt, unless_left
from crosspool.server.structured import asked_grammar, compiled

router = APIRouter(tags=["generation"])

ERRORS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "the answer, or its events"},
    400: {"model": ErrorBody, "description": "a field is wrong, or the request can never fit"},
    401: {"model": ErrorBody, "description": "the API key is missing or unknown"},
    404: {"model": ErrorBody, "description": "no model of that name is served"},
    408: {"model": ErrorBody, "description": "the request waited in its queue past its deadline"},
    413: {"model": ErrorBody, "description": "the body is too large"},
    429: {"model": ErrorBody, "description": "the model's queue is full; Retry-After says when to come back"},
    500: {"model": ErrorBody, "description": "the engine failed on this request"},
    503: {"model": ErrorBody, "description": "the server shuts down, or a worker did not come back in time"},
}


@router.post("/v1/chat/completions", summary="Answer a conversation", responses=ERRORS, response_model=None)
async def chat_completions(body: ChatBody, request: Request) -> Response:
    chat = await planned_chat(body, request)
    plan = chat.plan
    return await answer(
        chat.body, request, chat.model, plan.shape(chat.body, chat.model), [plan.prompt], plan.constraint
    )


@router.post("/v1/completions", summary="Go on from a prompt", responses=ERRORS, response_model=None)
async def completions(body: CompletionBody, request: Request) -> Response:
    model = prepare(body, request)
    limit = info_of(request.app.state.engine, model.name).context_limit
    prompts = await unless_left(request, completion_prompts(body, model, limit))
    constraint = None
    if (asked := asked_grammar(body)) is not None:
        constraint = await unless_left(request, compiled(asked, body, model.vocabulary))
    return await answer(body, request, model, CompletionShape(model.tokenizer), prompts, constraint)


async def answer(
    body: GenerationBody,
    request: Request,
    model: ModelFrontend,
    shape: AnswerShape,
    prompts: Sequence[list[int]],
    constraint: TokenConstraint | None,
) -> Response:
    state = request.app.state
    answer_id = shape.id_prefix + uuid.uuid4().hex
    limit = info_of(state.engine, model.name).context_limit
    requests: list[GenerationRequest] = [
        generation_request(
            body, model, prompt, request_id=f"{answer_id}-{index}", context_limit=limit, constraint=constraint
        )
        for index, prompt in enumerate(prompts)
    ]
    head: Json = {
        "id": answer_id,
        "object": shape.piece_object if body.stream else shape.whole_object,
        "created": int(time.time()),
        "model": model.name,
    }
    group = await open_group(state.engine, requests, state.metrics)
    if body.stream:
        keep_alive_s = state.config.sse_keep_alive_s
        return EventStream(answer_events(group, shape, head, usage=body.include_usage, keep_alive_s=keep_alive_s))
    outputs: dict[int, list[RequestOutput]] = {}
    for index, output in await unless_left(request, group.whole()):
        outputs.setdefault(index, []).append(output)
    lasts = {index: found[-1] for index, found in outputs.items()}
    return JSONResponse(
        {
            **head,
            "choices": [shape.whole(index, outputs[index]) for index in sorted(outputs)],
            "usage": usage_json(by_prompt(lasts, body.n)),
        }
    )
