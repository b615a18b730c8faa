"""Reasoning, content and tool calls of every format, whatever pieces the text comes in."""

# ruff: noqa: RUF001, E501
from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosspool.server.answer_formats import CALL_FORMATS, AnswerFormat, answer_format
from crosspool.server.answer_parser import AnswerParser

TYPES = {"book": {"nights": {"type": "integer"}, "city": {"type": "string"}}}
TEXTS: dict[str, str] = {
    "json": '<think>\nhm\n</think>\n\nSure. \n<tool_call>\n{"name": "book", "arguments": {"city": "Os}lo \\\\", "nights": 2}}\n'
    '</tool_call>\n<tool_call>\n{"arguments": {}, "name": "book"}\n</tool_call>',
    "function_tags": "<think>\nhm\n</think>\nSure.<tool_call>\n<function=book>\n<parameter=city>\nOs}lo \\\n</parameter>\n"
    "<parameter=nights>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=book>\n</function>\n</tool_call>",
    "key_value_tags": "<think>hm</think>\nSure.\n<tool_call>book\n<arg_key>city</arg_key>\n<arg_value>Os}lo \\</arg_value>\n"
    "<arg_key>nights</arg_key>\n<arg_value>2</arg_value>\n</tool_call><tool_call>book\n</tool_call>",
    "deepseek_v3": "<think>hm</think>Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>book\n```json\n"
    '{"city": "Os}lo \\\\", "nights": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>book\n```json\n'
    "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek": "<think>hm</think>Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>book<｜tool▁sep｜>"
    '{"city": "Os}lo \\\\", "nights": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>book<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "list": '<think>hm</think>Sure.[TOOL_CALLS] [{"name": "book", "arguments": {"city": "Os}lo \\\\", "nights": 2}}, '
    '{"name": "book", "arguments": {}}]',
    "channels": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Sure.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.book <|constrain|>json<|message|>{"city": "Os}lo \\\\", "nights": 2}'
    "<|call|><|start|>assistant<|channel|>commentary to=functions.book<|message|>{}",
}


def parsed(name: str, pieces: list[str], **options: Any) -> tuple[str, str, list[tuple[str, str]], bool]:
    form = AnswerFormat(CALL_FORMATS[name], thinks=name != "channels", has_channels=name == "channels")
    parser = AnswerParser(form, with_calls=True, types=TYPES, **options)
    found = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    calls: dict[int, list[str]] = {}
    for piece in found:
        for call in piece.calls:
            assert (call.id is None) == (call.name is None) == (call.index in calls)
            calls.setdefault(call.index, [call.name or "", ""])[1] += call.arguments
    content, reasoning = ("".join(getattr(piece, part) for piece in found) for part in ("content", "reasoning"))
    return content, reasoning, [(name, arguments) for name, arguments in calls.values()], parser.has_whole_calls


@pytest.mark.parametrize("name", TEXTS)
@given(data=st.data())
def test_any_pieces_give_the_same_parts(name: str, data: st.DataObject) -> None:
    text = TEXTS[name]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=30)))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    written = '{"city": "Os}lo \\\\", "nights": 2}'
    assert parsed(name, pieces) == ("Sure.", "hm", [("book", written), ("book", "{}")], True)


@pytest.mark.parametrize("name", TEXTS)
def test_a_cut_call_is_never_whole_and_its_arguments_are_a_beginning(name: str) -> None:
    text = TEXTS[name]
    whole = parsed(name, [text])
    starts = [text.index("book") + 4, *range(text.index("book") + 5, len(text) - 25, 7)]
    for cut in starts:
        content, _, calls, is_whole = parsed(name, [text[:cut]])
        assert content.startswith("Sure.")
        assert len(calls) <= 2
        if is_whole:  # cut between two calls
            assert calls == whole[2][: len(calls)]


def test_reasoning_that_the_prompt_opened() -> None:
    assert parsed("json", ["hm", "</thi", "nk>\n\nYes. "], is_thinking=True) == ("Yes. ", "hm", [], False)


def test_a_call_that_cannot_be_read_is_content() -> None:
    content, _, calls, is_whole = parsed("json", ["Sure. <tool_call>", "nonsense", "</tool_call>"])
    assert (calls, is_whole) == ([], False)
    assert "nonsense" in content


def test_marks_without_tools_are_text() -> None:
    parser = AnswerParser(AnswerFormat(CALL_FORMATS["json"], thinks=True), with_calls=False, types={})
    assert parser.feed("<tool_call>{}</tool_call>").content + parser.finish().content == "<tool_call>{}</tool_call>"


@pytest.mark.parametrize(
    ("source", "name", "thinks"),
    [
        ("{% for tool in tools %}<tool_call>{{ '</think>' }}", "json", True),
        ("{{ tools }}<tool_call>\n<function=", "function_tags", False),
        ("{{ tools }}<tool_call><arg_key></think>", "key_value_tags", True),
        ("{{ tools }}<｜tool▁sep｜>```json", "deepseek_v3", False),
        ("{{ tools }}<｜tool▁sep｜>", "deepseek", False),
        ("{{ tools }}[TOOL_CALLS]", "list", False),
        ("{{ tools }}<|channel|> to=functions.", "channels", False),
        ("<tool_call> but no list of them", None, False),
        ("{{ messages }}", None, False),
    ],
)
def test_a_template_tells_its_format(source: str, name: str | None, thinks: bool) -> None:
    form = answer_format(source)
    assert (form.calls.name if form.calls else None, form.thinks) == (name, thinks)
