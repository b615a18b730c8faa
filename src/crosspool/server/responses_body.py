"""Request bodies of OpenAI's Responses API, brought to the chat body that the rest of the server takes.

The server keeps no conversation: each request brings its own, and what refers to a kept one is refused.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError

from crosspool.server.errors import bad_request, from_validation, shorten
from crosspool.server.protocol import CacheSalt, ChatBody, Count, Flag, Number, RequestBody
from crosspool.server.refusals import refuse_extra

NOT_KEPT = ("previous_response_id", "conversation", "prompt", "background", "context_management")
TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


class ResponsesBody(RequestBody):
    """POST /v1/responses."""

    other_names: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
        "structured_outputs": "text.format",
        "system": "instructions",
        "timeout": "the header X-Request-Timeout",
    }

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    tools: list[dict[str, Any]] = Field([])
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Flag | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    cache_salt: CacheSalt | None = None
    stream: Flag = False
    metadata: dict[str, Any] | None = None
    store: Flag | None = Field(None, description="nothing is kept, whatever is asked")
    top_logprobs: int | None = None
    include: list[Any] | None = Field(None, description="nothing can be added to an answer")
    truncation: Literal["auto", "disabled"] | None = Field(None, description="an input that is too long is refused")

    def chat(self) -> ChatBody:
        """The same as a chat body. Raises APIError (400) that names the item."""
        for name in NOT_KEPT:
            if (self.model_extra or {}).get(name) not in (None, False):
                raise bad_request(
                    f"{name} is not offered: this server keeps nothing; send the whole conversation as input",
                    param=name,
                    code="unsupported_parameter",
                )
        if self.top_logprobs or "message.output_text.logprobs" in (self.include or ()):
            raise bad_request(
                "logprobs are not offered here; ask /v1/chat/completions for them",
                param="top_logprobs" if self.top_logprobs else "include",
                code="unsupported_parameter",
            )
        refuse_extra(self)
        effort = (self.reasoning or {}).get("effort")
        found = {
            "model": self.model,
            "messages": self._conversation(),
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [_tool(tool, index) for index, tool in enumerate(self.tools)],
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _format((self.text or {}).get("format")),
            "reasoning_effort": effort,
            "cache_salt": self.cache_salt,
        }
        try:
            return ChatBody.model_validate(found)
        except ValidationError as error:
            raise from_validation(error.errors()) from None

    def _conversation(self) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = []
        if self.instructions is not None:
            turns.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*turns, {"role": "user", "content": self.input}]
        for index, item in enumerate(self.input):
            _add(item, f"input[{index}]", turns)
        return turns


def _add(item: dict[str, Any], place: str, turns: list[dict[str, Any]]) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        turns.append({"role": item.get("role"), "content": _text(item.get("content"), f"{place}.content")})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not turns or turns[-1]["role"] != "assistant":
            turns.append({"role": "assistant", "content": None})
        turns[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = _text(item.get("output"), f"{place}.output")
        turns.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind != "reasoning":  # earlier reasoning is left out, as chat templates leave it out
        raise bad_request(f"{place}.type {shorten(ascii(kind), 60)} is not read here", param="input")


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{place} must be a string or a list of text parts", param="input")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise bad_request(f"{place}[{index}] must be a text part; nothing else is read here", param="input")
        texts.append(text)
    return "\n".join(texts)


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad_request(
            f"tools[{index}].type is {shorten(ascii(tool.get('type')), 60)}; only functions are offered",
            param="tools",
            code="unsupported_parameter",
        )
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _choice(choice: str | dict[str, Any] | None) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(form: Any) -> Any:
    if not isinstance(form, dict):
        if form is not None:
            raise bad_request("text.format must be an object", param="text")
        return None
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}
