"""Readers of one tool call's text as it comes: the name as soon as it is known, then the arguments in pieces.

Arguments that a model writes as JSON are passed on as written; those it writes as tags become JSON when the call ends.
What is passed on never changes later, so the pieces of a stream join to the string of a plain answer.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(slots=True)
class Call:
    """One call as far as it is read. is_whole: the arguments are complete and are a JSON object."""

    name: str
    arguments: str = ""
    is_whole: bool = False


class CallReader(Protocol):
    """Reads what stands between a format's marks of a call."""

    calls: list[Call]

    def feed(self, text: str) -> None: ...

    def close(self, *, is_cut: bool) -> None:
        """The mark at the end came, or, with `is_cut`, the answer's end."""
        ...


@dataclass(slots=True)
class HeadedReader:
    """A head that `head` matches, with the group `name`; then a JSON object; then anything.

    A body whose head does not match is read as one JSON object with name and arguments, when it is complete.
    """

    head: re.Pattern[str]
    calls: list[Call] = field(default_factory=list)
    _body: str = ""
    _depth: int = 0
    _in_string: bool = False
    _escaped: bool = False
    _is_done: bool = False

    def feed(self, text: str) -> None:
        if self.calls:
            self._argue(text)
            return
        self._body += text
        found = self.head.match(self._body)
        if found is not None:
            name = found["name"].strip()
            self.calls.append(Call(json.loads(f'"{name}"') if _is_json_text(name) else name))
            self._argue(self._body[found.end() :])

    def close(self, *, is_cut: bool) -> None:
        if not self.calls:
            self.calls += _calls_of(_json_or_none(self._body))
        for call in self.calls:
            call.is_whole = isinstance(_json_or_none(call.arguments), dict)

    def _argue(self, text: str) -> None:
        """Take the arguments' part of `text`: up to the bracket that closes them."""
        if self._is_done:
            return
        end = len(text)
        for index, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self._is_done, end = True, index + 1
                    break
        self.calls[0].arguments += text[:end]


@dataclass(slots=True)
class TaggedReader:
    """A name, then arguments in tags. name: group `name`; argument: groups `key` and `value`, found one after another.

    types: of each tool's arguments by name; a value of another type than string is read as JSON where it is JSON.
    """

    name: re.Pattern[str]
    argument: re.Pattern[str]
    types: Mapping[str, Mapping[str, Any]]
    calls: list[Call] = field(default_factory=list)
    _body: str = ""

    def feed(self, text: str) -> None:
        self._body += text
        if not self.calls and (found := self.name.match(self._body)) is not None:
            self.calls.append(Call(found["name"].strip()))

    def close(self, *, is_cut: bool) -> None:
        if not self.calls:
            return
        call = self.calls[0]
        properties = self.types.get(call.name, {})
        values = {item["key"].strip(): item["value"] for item in self.argument.finditer(self._body)}
        typed = {key: _typed(value, properties.get(key)) for key, value in values.items()}
        call.arguments = json.dumps(typed, ensure_ascii=False)
        call.is_whole = not is_cut


@dataclass(slots=True)
class ListReader:
    """A JSON list of calls, read when it is complete."""

    calls: list[Call] = field(default_factory=list)
    _body: str = ""

    def feed(self, text: str) -> None:
        self._body += text

    def close(self, *, is_cut: bool) -> None:
        found = _json_or_none(self._body)
        self.calls = [call for item in (found if isinstance(found, list) else [found]) for call in _calls_of(item)]


def _calls_of(value: Any) -> list[Call]:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return []
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json_or_none(arguments)
    return [Call(value["name"], json.dumps(arguments, ensure_ascii=False), isinstance(arguments, dict))]


def _typed(value: str, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, dict) else None
    kinds = kind if isinstance(kind, list) else [kind]
    found = None if kinds == ["string"] else _json_or_none(value)
    if found is None or (isinstance(found, str) and not value.strip().startswith('"')):
        return None if value.strip() == "null" and kinds != ["string"] else value
    return found


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_json_text(name: str) -> bool:
    return "\\" in name and _json_or_none(f'"{name}"') is not None
