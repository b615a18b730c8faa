"""Request bodies of Anthropic's Messages API, brought to the chat body that the rest of the server takes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError

from crosspool.server.errors import APIError, bad_request, from_validation, shorten
from crosspool.server.protocol import CacheSalt, ChatBody, Count, Flag, Number, RequestBody, Stop
from crosspool.server.refusals import refuse_extra

IGNORED_BLOCKS = ("redacted_thinking",)
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CountBody(RequestBody):
    """POST /v1/messages/count_tokens: what makes the prompt."""

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = Field([])
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None

    def chat(self) -> ChatBody:
        """The same as a chat body. Raises APIError (400) that names the message and block."""
        found: dict[str, Any] = {"model": self.model, "messages": self._conversation(), **self._sampling()}
        if self.tools:
            found["tools"] = [_tool(tool, index) for index, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            found |= _choice(self.tool_choice)
        if self.thinking is not None:
            found["chat_template_kwargs"] = {"enable_thinking": _thinks(self.thinking)}
        try:
            return ChatBody.model_validate(found)
        except ValidationError as error:
            raise from_validation(error.errors()) from None

    def _sampling(self) -> dict[str, Any]:
        return {}

    def _conversation(self) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = []
        if self.system is not None:
            turns.append({"role": "system", "content": _text(self.system, "system")})
        for index, message in enumerate(self.messages):
            turns += _turns(message, f"messages[{index}]")
        return turns


class MessagesBody(CountBody):
    """POST /v1/messages."""

    other_names: ClassVar[Mapping[str, str]] = {
        "chat_template_kwargs": "thinking",
        "instructions": "system",
        "max_completion_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
        "parallel_tool_calls": "disable_parallel_tool_use in tool_choice",
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
        "structured_outputs": "output_config.format",
        "timeout": "the header X-Request-Timeout",
    }

    max_tokens: Count
    temperature: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=0)] | None = None
    stop_sequences: Stop = Field([])
    stream: Flag = False
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    output_config: dict[str, Any] = Field({}, description="format: a JSON schema; effort: handed to the chat template")
    output_format: dict[str, Any] | None = Field(None, description="the older place of output_config.format")
    cache_salt: CacheSalt | None = None

    def chat(self) -> ChatBody:
        refuse_extra(self)
        return super().chat()

    def _sampling(self) -> dict[str, Any]:
        form, effort = self.output_config.get("format"), self.output_config.get("effort")
        return {
            "response_format": _form(self.output_format if form is None else form),
            "reasoning_effort": None if effort is None else _string(effort, "output_config.effort"),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "cache_salt": self.cache_salt,
            "stop": self.stop_sequences,
            "stream": self.stream,
        }


def _turns(message: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """One message as chat turns: results of tools come before what the user says with them."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{place}.role is {shorten(ascii(role), 60)}; roles are user and assistant", param="messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise bad_request(f"{place}.content must be a string or a list of blocks", param="messages")
    blocks = _Blocks(role)
    for index, block in enumerate(content):
        blocks.add(block, f"{place}.content[{index}]")
    return blocks.turns()


@dataclass(slots=True)
class _Blocks:
    """What the content blocks of one message hold, by kind."""

    role: str
    texts: list[str] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)

    def add(self, block: Any, where: str) -> None:
        """Raises APIError (400) for a block that this role does not write."""
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            self.texts.append(_string(block.get("text"), f"{where}.text"))
        elif kind == "tool_result" and self.role == "user":
            text = _text(block.get("content") or "", f"{where}.content")
            identity = _string(block.get("tool_use_id"), f"{where}.tool_use_id")
            self.results.append({"role": "tool", "tool_call_id": identity, "content": text})
        elif kind == "tool_use" and self.role == "assistant":
            self.calls.append(_tool_use(block, where))
        elif kind == "thinking" and self.role == "assistant":
            self.thoughts.append(_string(block.get("thinking"), f"{where}.thinking"))
        elif kind not in IGNORED_BLOCKS:
            raise bad_request(
                f"{where} is of type {shorten(ascii(kind), 60)}, which is not read in a message of role {self.role}",
                param="messages",
            )

    def turns(self) -> list[dict[str, Any]]:
        if self.results and not (self.texts or self.calls):
            return self.results
        turn: dict[str, Any] = {
            "role": self.role,
            "content": "\n".join(self.texts) if self.texts or not self.calls else None,
        }
        if self.calls:
            turn["tool_calls"] = self.calls
        if self.thoughts:
            turn["reasoning_content"] = "\n".join(self.thoughts)
        return [*self.results, turn]


def _tool_use(block: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise bad_request(f"{where}.input must be an object", param="messages")
    function = {"name": _string(block.get("name"), f"{where}.name"), "arguments": json.dumps(arguments)}
    return {"id": _string(block.get("id"), f"{where}.id"), "type": "function", "function": function}


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type", "custom") not in ("custom", None):
        raise bad_request(f"tools[{index}].type {shorten(ascii(tool['type']), 60)} is not offered", param="tools")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    found: dict[str, Any] = {}
    if choice.get("disable_parallel_tool_use") is True:
        found["parallel_tool_calls"] = False
    if kind == "tool":
        return {**found, "tool_choice": {"type": "function", "function": {"name": choice.get("name")}}}
    if not isinstance(kind, str) or kind not in CHOICES:
        raise bad_request("tool_choice.type must be auto, any, tool or none", param="tool_choice")
    return {**found, "tool_choice": CHOICES[kind]}


def _form(form: Any) -> dict[str, Any] | None:
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise _wrong("output_config.format", '{"type": "json_schema", "schema": {...}}')
    return {"type": "json_schema", "json_schema": {"schema": form["schema"]}}


def _thinks(thinking: dict[str, Any]) -> bool:
    kind = thinking.get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise bad_request("thinking.type must be enabled, adaptive or disabled", param="thinking")
    return str(kind) != "disabled"


def _text(content: Any, place: str) -> str:
    """A string, or the text of blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(place, "a string or a list of text blocks")
    texts = []
    for index, block in enumerate(content):
        if not isinstance(block, dict) or block.get("type") != "text":
            raise _wrong(f"{place}[{index}]", "a text block; nothing else is read here")
        texts.append(_string(block.get("text"), f"{place}[{index}].text"))
    return "\n".join(texts)


def _string(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise _wrong(place, "a string")
    return value


def _wrong(place: str, wanted: str) -> APIError:
    return bad_request(f"{place} must be {wanted}", param=place.split("[")[0].split(".")[0])
