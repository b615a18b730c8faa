"""Grammars put together from parts: forced tool calls, and an answer that follows on reasoning.

A compiler's source is JSON with a list of grammars; those after the first are named, and `@name` in the first one's
Lark text stands for them.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from crosspool.core import TokenConstraint
from crosspool.server.answer_formats import THINK_CLOSE, CallFormat
from crosspool.server.structured import GrammarSource, schema_grammar
from crosspool.server.tools import ToolUse


class AfterThinking:
    """A vocabulary whose grammars begin where the reasoning that the prompt has opened ends."""

    def __init__(self, vocabulary: GrammarSource, special_tokens: Mapping[str, int]) -> None:
        self._vocabulary = vocabulary
        self._close = THINK_CLOSE if THINK_CLOSE not in special_tokens else f"<[{special_tokens[THINK_CLOSE]}]>"

    def grammar(self, source: str) -> TokenConstraint:
        if self._close == THINK_CLOSE:
            thought = f'thought[suffix="{THINK_CLOSE}"]: /(?s:.*)/'
        else:
            thought = f"thought: /(?s:.*)/ {self._close}"
        lark = f"start: thought /\\s{{0,4}}/ @answer\n{thought}"
        return self._vocabulary.grammar(combined(lark, {"answer": source}))


def combined(lark: str, parts: Mapping[str, str]) -> str:
    """One source from a Lark text and the sources of what it names."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": lark}]
    for name, source in parts.items():
        first, *others = json.loads(source)["grammars"]
        grammars += [{**first, "name": name}, *others]
    return json.dumps({"grammars": grammars})


def forced_calls(use: ToolUse, form: CallFormat, special_tokens: Mapping[str, int]) -> str:
    """The source of an answer that consists of calls to the forced tools, one or, unless `is_single`, several."""
    literal = _Literal(special_tokens)
    parts: dict[str, str] = {}
    rules = [f"call_{index}: {_call(use, name, form, literal, parts)}" for index, name in enumerate(use.forced)]
    before, after = form.around
    more = "" if use.is_single else f" ({literal(form.between)} call)*"
    names = " | ".join(f"call_{index}" for index in range(len(use.forced)))
    lark = "\n".join([f"start: {literal(before)} call{more} {literal(after)}", f"call: {names}", *rules])
    return combined(lark, parts)


def _call(use: ToolUse, name: str, form: CallFormat, literal: "_Literal", parts: dict[str, str]) -> str:
    schema = use.parameters(name)
    if form.forced is not None:
        before, after = form.forced
        return f"{literal(before.replace('{name}', name))} {_json(schema, parts)} {literal(after)}"
    assert form.tags is not None, "a format has one of both, or calls are not forced"
    before, key_mark, value_end, after = form.tags
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rule = [literal(before.replace("{name}", name))]
    for key, item in schema.get("properties", {}).items():
        mark = literal(key_mark.replace("{key}", key))
        one = f"{mark} {_tag_value(item, shared, parts, value_end, literal)}"
        rule.append(one if key in schema.get("required", ()) else f"({one})?")
    return " ".join([*rule, literal(after)])


def _tag_value(schema: Any, shared: dict[str, Any], parts: dict[str, str], end: str, literal: "_Literal") -> str:
    """A string stands in a tag as it is, anything else as JSON; then the mark at its end."""
    values = schema.get("enum") if isinstance(schema, dict) else None
    if isinstance(schema, dict) and schema.get("type") == "string" and values is None:
        mark = end.replace("/", r"\/").replace("\n", r"\n")
        return f"/[^<]+{mark}/"
    if values and all(isinstance(item, str) and item for item in values):
        return f"({' | '.join(json.dumps(item, ensure_ascii=False) for item in values)}) {literal(end)}"
    return f"{_json({**shared, **schema} if isinstance(schema, dict) else schema, parts)} {literal(end)}"


def _json(schema: Any, parts: dict[str, str]) -> str:
    name = f"part_{len(parts)}"
    parts[name] = schema_grammar(schema)
    return f"@{name}"


class _Literal:
    """Text as Lark writes it: special tokens by id, the rest as strings."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        marks: Iterable[str] = sorted(special_tokens, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, marks)) + ")") if special_tokens else None

    def __call__(self, text: str) -> str:
        pieces = self._split.split(text) if self._split is not None else [text]
        return " ".join(self._written(piece) for piece in pieces if piece)

    def _written(self, piece: str) -> str:
        token_id = self._special_tokens.get(piece)
        return json.dumps(piece, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"
