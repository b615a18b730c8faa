"""The way from a conversation to the engine that the APIs with answers of their own shape share."""

from dataclasses import dataclass

from fastapi import Request

from crosspool.engine.request import GenerationRequest
from crosspool.server.answer_parser import AnswerParser
from crosspool.server.catalogue import ModelFrontend
from crosspool.server.chat_plan import ChatPlan
from crosspool.server.outputs import OutputGroup, open_group
from crosspool.server.preparation import planned_chat
from crosspool.server.protocol import ChatBody
from crosspool.server.sampling import generation_request


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
