"""`tools` and `tool_choice`, checked: which functions a model may call, and whether it has to."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crosspool.server.errors import bad_request, shorten
from crosspool.server.protocol import ChatBody

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request.

    given: as the chat template takes them. forced: names of those one of which must be called; () leaves the choice to
    the model. is_single: at most one call.
    """

    given: tuple[dict[str, Any], ...] = ()
    forced: tuple[str, ...] = ()
    is_single: bool = False

    def parameters(self, name: str) -> dict[str, Any]:
        """The schema of a tool's arguments."""
        for tool in self.given:
            if tool["function"]["name"] == name:
                found: dict[str, Any] = tool["function"].get("parameters") or {"type": "object"}
                return found
        raise KeyError(name)

    def place(self, name: str) -> str:
        """Where in the body the schema stands."""
        index = next(index for index, tool in enumerate(self.given) if tool["function"]["name"] == name)
        return f"tools[{index}].function.parameters"


def tool_use(body: ChatBody) -> ToolUse:
    """Raises APIError (400) for tools or a choice that cannot be honoured."""
    choice = body.tool_choice
    tools = _checked(body.tools)
    names = tuple(tool["function"]["name"] for tool in tools)
    if isinstance(choice, dict):
        wanted = _chosen(choice)
        if wanted not in names:
            raise bad_request(
                f"tool_choice names {shorten(ascii(wanted), 80)}, which is not among the tools", param="tool_choice"
            )
        return ToolUse(tools, (wanted,), is_single=True)
    if choice == "required" and not tools:
        raise bad_request('tool_choice "required" needs tools; send some', param="tool_choice")
    if choice == "none" or not tools:
        return ToolUse()
    return ToolUse(tools, names if choice == "required" else (), is_single=body.parallel_tool_calls is False)


def _checked(tools: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are taken", param="tools")
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise bad_request(f'tools[{index}] must be {{"type": "function", "function": {{...}}}}', param="tools")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise bad_request(
                f"tools[{index}].function.name must have 1 to 64 letters, digits, dots, dashes or underscores",
                param="tools",
            )
        if name in seen:
            raise bad_request(f"tools[{index}] has the name {name} of another tool", param="tools")
        if parameters is not None and not isinstance(parameters, dict):
            raise bad_request(f"tools[{index}].function.parameters must be a schema (an object)", param="tools")
        seen.add(name)
    return tuple(tools)


def _chosen(choice: dict[str, Any]) -> Any:
    function = choice.get("function")
    if choice.get("type") != "function" or not isinstance(function, dict):
        raise bad_request(
            'tool_choice must be none, auto, required or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    return function.get("name")
