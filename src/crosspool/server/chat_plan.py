"""How one chat request is answered: its prompt, the form of its answer, and how the answer is read."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from crosspool.core import TokenConstraint
from crosspool.server.answer_formats import THINK_OPEN, AnswerFormat
from crosspool.server.answer_parser import AnswerParser, has_template, response_template
from crosspool.server.catalogue import ModelFrontend
from crosspool.server.choices import ChatShape
from crosspool.server.errors import APIError, bad_request
from crosspool.server.grammar import GrammarError
from crosspool.server.grammar_parts import AfterThinking, forced_calls
from crosspool.server.parsed_chat import ParsedChatShape
from crosspool.server.prompts import chat_prompt
from crosspool.server.protocol import ChatBody
from crosspool.server.schemas import check_schema
from crosspool.server.structured import GrammarSource, asked_grammar, compiled, refused, refused_schema
from crosspool.server.tools import ToolUse, tool_use

TAIL_TOKENS = 16
"""Tokens at a prompt's end in which an opened reasoning is looked for."""

Parser = Callable[[], AnswerParser]


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """shows_marks: special tokens have to stay in the text, since some of them mark its parts."""

    prompt: list[int]
    constraint: TokenConstraint | None = None
    parser: Parser | None = None
    shows_marks: bool = False

    def shape(self, body: ChatBody, model: ModelFrontend) -> ChatShape:
        if self.parser is None:
            return ChatShape(model.tokenizer)
        return ParsedChatShape(model.tokenizer, self.parser, show_reasoning=body.include_reasoning)


async def chat_plan(body: ChatBody, model: ModelFrontend, limit: int) -> ChatPlan:
    """`limit`: the model's context limit. Raises APIError (400) for what its template, or any grammar, cannot do."""
    use = tool_use(body)
    form = model.template.format if model.template is not None else AnswerFormat()
    _check(body, use, form, model)
    asked = asked_grammar(body)
    prompt = await chat_prompt(body, model, use, limit)
    plan = ChatPlan(prompt)
    tail = model.tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False).rstrip()
    is_thinking = form.thinks and tail.endswith(THINK_OPEN)
    vocabulary: GrammarSource = model.vocabulary
    if is_thinking:
        vocabulary = AfterThinking(model.vocabulary, model.tokenizer.special_tokens)
    if use.forced:
        plan = replace(plan, constraint=await compiled(partial(_calls, use, form, model), body, vocabulary))
    elif asked is not None:
        plan = replace(plan, constraint=await compiled(asked, body, vocabulary))
    if form.is_plain and not use.given:
        return plan
    with_calls = bool(use.given)
    if not has_template(form, with_calls):
        await asyncio.to_thread(response_template, form, with_calls)
    types = {tool["function"]["name"]: _properties(tool["function"]) for tool in use.given}
    parser = partial(AnswerParser, form, with_calls=with_calls, types=types, is_thinking=is_thinking)
    marks = str(form.fields(with_calls=with_calls)).replace("\\", "")
    shows_marks = any(token in marks for token in model.tokenizer.special_tokens)
    return replace(plan, parser=parser, shows_marks=shows_marks)


def _check(body: ChatBody, use: ToolUse, form: AnswerFormat, model: ModelFrontend) -> None:
    if use.given and form.calls is None:
        raise bad_request(
            f"the chat template of {model.name} knows no tools; leave them out, or ask another model",
            param="tools",
            code="unsupported_parameter",
        )
    is_asked = asked_grammar(body) is not None
    if use.given and is_asked:
        raise _together("response_format", "tools")
    if form.has_channels and (use.forced or is_asked):
        field = "tool_choice" if use.forced else "response_format"
        raise bad_request(
            f"{field} cannot be enforced on {model.name}, whose answers stand in channels",
            param=field,
            code="unsupported_parameter",
        )


def _calls(use: ToolUse, form: AnswerFormat, model: ModelFrontend, vocabulary: GrammarSource) -> TokenConstraint:
    """The grammar of forced calls. Runs in a thread."""
    places = {}
    for name in use.forced:
        try:
            places[use.place(name)] = check_schema(use.parameters(name))
        except GrammarError as error:
            raise refused(use.place(name), str(error)) from None
    assert form.calls is not None, "checked before"
    try:
        return vocabulary.grammar(forced_calls(use, form.calls, model.tokenizer.special_tokens))
    except (GrammarError, ValueError) as error:
        blamed = (refused_schema(place, parts) for place, parts in places.items())
        raise next(filter(None, blamed), None) or refused("tools", f": {error}") from None


def _properties(function: dict[str, object]) -> dict[str, object]:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return properties if isinstance(properties, dict) else {}


def _together(one: str, other: str) -> APIError:
    return bad_request(f"{one} cannot go with {other}; send one of them", param=one, code="unsupported_parameter")
