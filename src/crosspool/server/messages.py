"""Chat messages: the shapes clients send, brought to one shape that chat templates take.

Text parts are joined by line breaks; tool-call arguments that are a JSON object in a string become the object, since
templates walk them; `developer` stays a role of its own until the template turns out not to know it.
"""

import json
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_MESSAGES = 10_000

Message = dict[str, Any]


def parse_messages(value: Any) -> list[Message]:
    """The conversation in template form. Raises ValueError that names the message and what is wrong with it."""
    if not isinstance(value, list):
        raise ValueError("must be a list of messages")
    if not value:
        raise ValueError("is an empty list; send at least one message")
    if len(value) > MAX_MESSAGES:
        raise ValueError(f"has {len(value)} entries; at most {MAX_MESSAGES} are taken")
    return [_message(item, index) for index, item in enumerate(value)]


Messages = Annotated[
    list[Message],
    BeforeValidator(parse_messages),
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {
                    "role": {"type": "string", "enum": list(ROLES)},
                    "content": {
                        "anyOf": [
                            {"type": "string"},
                            {"type": "null"},
                            {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "required": ["type", "text"],
                                    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                                },
                            },
                        ]
                    },
                },
            },
        }
    ),
]


def _message(value: Any, index: int) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"entry {index} is not an object with role and content")
    role = value.get("role")
    if role not in ROLES:
        raise ValueError(f"entry {index} has the role {str(role)[:40]!r}; roles are {', '.join(ROLES)}")
    message: Message = {key: item for key, item in value.items() if item is not None and key != "content"}
    message["content"] = _text(value.get("content"), index)
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], index)
    if message["content"] is None and role != "assistant":
        raise ValueError(f"entry {index} ({role}) has no content")
    if message["content"] is None and not message.get("tool_calls"):
        message["content"] = ""
    for key in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if key in message and not isinstance(message[key], str):
            raise ValueError(f"entry {index} has a {key} that is not a string")
    return message


def _text(content: Any, index: int) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"entry {index} has content that is neither a string nor a list of text parts")
    texts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise ValueError(f"entry {index} has a content part of type {str(kind)[:40]!r}; only text is read here")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise ValueError(f"entry {index} has a text part without text")
        texts.append(text)
    return "\n".join(texts)


def _tool_calls(value: Any, index: int) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise ValueError(f"entry {index} has tool_calls that are not a list")
    calls: list[dict[str, Any]] = []
    for call in value:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"entry {index} has a tool call without a function name")
        calls.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return calls


def _arguments(value: Any) -> Any:
    """The object inside a JSON string; any other text stays as it is, so that nothing is lost."""
    if value is None:
        return {}
    if isinstance(value, str):
        try:
            parsed = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError):
            return value
        return parsed if isinstance(parsed, dict) else value
    return value
