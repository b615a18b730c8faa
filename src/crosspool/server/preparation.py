"""What comes before a request's tokens go to the engine: its model, its deadline, and of a conversation its plan."""

import math
from dataclasses import dataclass

from fastapi import Request

from crosspool.engine.request import GenerationRequest
from crosspool.server.answer_parser import AnswerParser
from crosspool.server.catalogue import ModelFrontend
from crosspool.server.chat_plan import ChatPlan, chat_plan
from crosspool.server.engine_client import info_of
from crosspool.server.errors import APIError, bad_request
from crosspool.server.outputs import OutputGroup, open_group
from crosspool.server.protocol import MAX_TIMEOUT_S, ChatBody, GenerationBody
from crosspool.server.refusals import refuse_unsupported
from crosspool.server.sampling import generation_request
from crosspool.server.stream import unless_left

TIMEOUT_HEADER = "X-Request-Timeout"


@dataclass(frozen=True, slots=True)
class PlannedChat:
    """A conversation that may be answered. context_limit: the model's, in tokens."""

    body: ChatBody
    model: ModelFrontend
    context_limit: int
    plan: ChatPlan


async def planned_chat(body: ChatBody, request: Request) -> PlannedChat:
    """The conversation in `body` with its model and plan. Raises APIError where it is wrong, ClientLeft."""
    model = prepare(body, request)
    limit: int = info_of(request.app.state.engine, model.name).context_limit
    plan = await unless_left(request, chat_plan(body, model, limit))
    if plan.shows_marks:
        body = body.model_copy(update={"skip_special_tokens": False})
    return PlannedChat(body, model, limit, plan)


def prepare(body: GenerationBody, request: Request) -> ModelFrontend:
    """The model that is asked, after the checks that need no tokens. Raises APIError."""
    state = request.app.state
    if state.draining:
        raise APIError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})
    model: ModelFrontend = state.catalogue.resolve(body.model)
    request.state.model = model.name
    refuse_unsupported(body)
    if body.timeout is None:
        body.timeout = header_timeout_s(request.headers.get(TIMEOUT_HEADER))
    return model


def header_timeout_s(value: str | None) -> float | None:
    """The deadline in a header. Raises APIError (400) for anything but a number of seconds above 0."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise bad_request(
            f"the header {TIMEOUT_HEADER} must be seconds above 0 and at most {MAX_TIMEOUT_S}", param=TIMEOUT_HEADER
        )
    return seconds


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A conversation that the engine answers now. `group` has to be read or closed."""

    model: ModelFrontend
    plan: ChatPlan
    asked: GenerationRequest
    group: OutputGroup

    @property
    def parser(self) -> AnswerParser | None:
        """A new parser of its text; None where all of it is content."""
        return None if self.plan.parser is None else self.plan.parser()


async def chat_answer(chat: ChatBody, request: Request, answer_id: str) -> ChatAnswer:
    """Hand the conversation to the engine as `answer_id`. Raises APIError where it is wrong or refused."""
    found = await planned_chat(chat, request)
    model, plan, state = found.model, found.plan, request.app.state
    asked = generation_request(
        found.body,
        model,
        plan.prompt,
        request_id=answer_id,
        context_limit=found.context_limit,
        constraint=plan.constraint,
    )
    return ChatAnswer(model, plan, asked, await open_group(state.engine, [asked], state.metrics))
