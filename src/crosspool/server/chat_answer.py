"""The way from a conversation to the engine that the APIs with answers of their own shape share."""

from dataclasses import dataclass

from fastapi import Request

from crosspool.engine.request import GenerationRequest
from crosspool.server.catalogue import ModelFrontend
from crosspool.server.chat_plan import ChatPlan, chat_plan
from crosspool.server.generation_routes import prepare
from crosspool.server.outputs import OutputGroup, open_group
from crosspool.server.protocol import ChatBody
from crosspool.server.sampling import generation_request
from crosspool.server.stream import unless_left


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A conversation that the engine answers now. `group` has to be read or closed."""

    model: ModelFrontend
    plan: ChatPlan
    asked: GenerationRequest
    group: OutputGroup


async def chat_answer(chat: ChatBody, request: Request, answer_id: str) -> ChatAnswer:
    """Hand the conversation to the engine as `answer_id`. Raises APIError where it is wrong or refused."""
    model = prepare(chat, request)
    state = request.app.state
    limit = state.engine.model(model.name).context_limit
    plan = await unless_left(request, chat_plan(chat, model, limit))
    if plan.shows_marks:
        chat = chat.model_copy(update={"skip_special_tokens": False})
    asked = generation_request(
        chat, model, plan.prompt, request_id=answer_id, context_limit=limit, constraint=plan.constraint
    )
    return ChatAnswer(model, plan, asked, await open_group(state.engine, [asked], state.metrics))
