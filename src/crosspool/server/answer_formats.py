"""How families write reasoning and tool calls, told from a model's own chat template.

A format is data: the marks around each part, for transformers' ResponseParser, and how a call reads between them. The
marks are those that the published chat templates of the families write and train on.
"""

# ruff: noqa: RUF001
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from crosspool.server.call_readers import CallReader, HeadedReader, ListReader, TaggedReader

Types = Mapping[str, Mapping[str, Any]]
"""Of each tool: the schemas of its arguments by name."""

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

_JSON_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>(?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)'
)
_DEEPSEEK_V3_HEAD = re.compile(r"function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n\s*(?=\S)")
_DEEPSEEK_HEAD = re.compile(r"(?P<name>[^\n<]+)<｜tool▁sep｜>\s*(?=\S)")
_DEEPSEEK_MARKS = {
    "open_pattern": "(?:<｜tool▁calls▁begin｜>)?\\s*<｜tool▁call▁begin｜>",
    "close": "<｜tool▁call▁end｜>",
}
_HARMONY_HEAD = re.compile(r"(?P<name>[\w.-]+)[^{]*?<\|message\|>\s*(?=\S)")


@dataclass(frozen=True, slots=True, eq=False)
class CallFormat:
    """Tool calls of one format.

    marks: how a call opens and closes, as in a response template. forced: what a grammar that forces calls writes
    before the arguments' JSON (with {name}) and after it, None where calls cannot be forced; around, between: likewise
    of all calls. tags: likewise where arguments stand in tags: before them (with {name}), before a value (with {key}),
    after it, after them. short_ids: the family's template takes ids of nine letters and digits only.
    """

    name: str
    marks: dict[str, Any]
    reader: Callable[[Types], CallReader]
    forced: tuple[str, str] | None = None
    tags: tuple[str, str, str, str] | None = None
    around: tuple[str, str] = ("", "")
    between: str = "\n"
    short_ids: bool = False


CALL_FORMATS: dict[str, CallFormat] = {
    item.name: item
    for item in (
        CallFormat(
            "json",
            {"open": "<tool_call>", "close": "</tool_call>"},
            lambda types: HeadedReader(_JSON_HEAD),
            ('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>"),
        ),
        CallFormat(
            "function_tags",
            {"open": "<tool_call>", "close": "</tool_call>"},
            lambda types: TaggedReader(
                re.compile(r"\s*<function=(?P<name>[^>\n]+)>"),
                re.compile(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>", re.DOTALL),
                types,
            ),
            tags=(
                "<tool_call>\n<function={name}>\n",
                "<parameter={key}>\n",
                "\n</parameter>\n",
                "</function>\n</tool_call>",
            ),
        ),
        CallFormat(
            "key_value_tags",
            {"open": "<tool_call>", "close": "</tool_call>"},
            lambda types: TaggedReader(
                re.compile(r"\s*(?P<name>[^\s<]+)\s*(?:\n|<)"),
                re.compile(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL),
                types,
            ),
            tags=(
                "<tool_call>{name}\n",
                "<arg_key>{key}</arg_key>\n<arg_value>",
                "</arg_value>\n",
                "</tool_call>",
            ),
        ),
        CallFormat(
            "deepseek_v3",
            _DEEPSEEK_MARKS,
            lambda types: HeadedReader(_DEEPSEEK_V3_HEAD),
            ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n", "\n```<｜tool▁call▁end｜>"),
            around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
        CallFormat(
            "deepseek",
            _DEEPSEEK_MARKS,
            lambda types: HeadedReader(_DEEPSEEK_HEAD),
            ("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
            around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            between="",
        ),
        CallFormat(
            "list",
            {"open": "[TOOL_CALLS]"},
            lambda types: ListReader(),
            ('{"name": "{name}", "arguments": ', "}"),
            around=("[TOOL_CALLS] [", "]"),
            between=", ",
            short_ids=True,
        ),
        CallFormat(
            "channels",
            {
                "open_pattern": r"<\|channel\|>commentary\s+to=functions\.|\s+to=functions\.",
                "close": ["<|call|>", "<|end|>"],
            },
            lambda types: HeadedReader(_HARMONY_HEAD),
        ),
    )
}

# Marks in a chat template's source, the most telling first.
_CALL_MARKS = (
    ("to=functions.", "channels"),
    ("<function=", "function_tags"),
    ("<arg_key>", "key_value_tags"),
    ("<tool_call>", "json"),
    ("[TOOL_CALLS]", "list"),
)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What a model's answers may hold beside plain text."""

    calls: CallFormat | None = None
    thinks: bool = False  # between THINK_OPEN and THINK_CLOSE
    has_channels: bool = False  # every part of an answer stands in a channel, the text too

    @property
    def is_plain(self) -> bool:
        return not (self.thinks or self.has_channels)

    def fields(self, *, with_calls: bool) -> dict[str, Any]:
        """The fields of a response template."""
        plain = {"content": "text", "content_args": {"strip": False}, "repeats": True}
        found: dict[str, Any] = {}
        if self.has_channels:
            found["reasoning"] = {"open": "<|channel|>analysis<|message|>", "close": "<|end|>", **plain}
            close = ["<|end|>", "<|return|>"]
            found["content"] = {"open": "<|channel|>final<|message|>", "close": close, **plain}
            # what introduces a call is no comment
            found["comment"] = {"open": "<|channel|>commentary<|message|>", "close": close, **plain}
        else:
            found["content"] = dict(plain)
            if self.thinks:
                found["reasoning"] = {"open": THINK_OPEN, "close": THINK_CLOSE, **plain}
        if with_calls and self.calls is not None:
            found["tool_calls"] = {**self.calls.marks, **plain}
            if self.calls.around[1].startswith("<"):  # nothing follows the last call but marks
                found["rest"] = {"open": self.calls.around[1], **plain}
        return found


def answer_format(source: str) -> AnswerFormat:
    """The format that a chat template's source shows."""
    return AnswerFormat(
        calls=_call_format(source) if "tools" in source else None,
        thinks=THINK_CLOSE in source,
        has_channels="<|channel|>" in source,
    )


def _call_format(source: str) -> CallFormat | None:
    if "tool▁sep" in source:
        return CALL_FORMATS["deepseek_v3" if "```json" in source else "deepseek"]
    found = next((name for mark, name in _CALL_MARKS if mark in source), None)
    return None if found is None else CALL_FORMATS[found]
