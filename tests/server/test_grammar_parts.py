"""Grammars of forced calls: each takes what its family writes, and what the parser reads; nothing less."""

# ruff: noqa: RUF001
from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from crosspool.server.answer_formats import CALL_FORMATS, AnswerFormat
from crosspool.server.answer_parser import AnswerParser
from crosspool.server.grammar import Grammar, GrammarVocabulary
from crosspool.server.grammar_parts import AfterThinking, forced_calls
from crosspool.server.structured import schema_grammar
from crosspool.server.tools import ToolUse
from tests.support.tiny_tokenizer import END_OF_TURN, write_tiny_tokenizer

BOOK = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "nights": {"$ref": "#/$defs/count"}},
            "required": ["city"],
            "$defs": {"count": {"type": "integer"}},
            "additionalProperties": False,
        },
    },
}
USE = ToolUse((BOOK,), ("book",))
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
CALLS = {
    "json": '<tool_call>\n{"name": "book", "arguments": {"city": "Oslo", "nights": 2}}\n</tool_call>',
    "function_tags": "<tool_call>\n<function=book>\n<parameter=city>\nOslo\n</parameter>\n<parameter=nights>\n2\n"
    "</parameter>\n</function>\n</tool_call>",
    "key_value_tags": "<tool_call>book\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>nights</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "deepseek_v3": DEEPSEEK.replace("{}", 'function<｜tool▁sep｜>book\n```json\n{"city": "Oslo", "nights": 2}\n```'),
    "deepseek": DEEPSEEK.replace("{}", 'book<｜tool▁sep｜>{"city": "Oslo", "nights": 2}'),
    "list": '[TOOL_CALLS] [{"name": "book", "arguments": {"city": "Oslo", "nights": 2}}]',
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(directory)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer.to_str(), 512, (0,))


def takes(grammar: Grammar, ids: list[int]) -> bool:
    """Whether every token is allowed in turn, and then the end token."""
    for token in [*ids, 0]:
        if not grammar.allowed[token // 8] >> token % 8 & 1:
            return False
        if token:
            grammar.advance(token)
    return True


@pytest.mark.parametrize("name", CALLS)
def test_a_forced_call_is_what_the_family_writes_and_the_parser_reads(
    name: str, tokenizer: Tokenizer, vocabulary: GrammarVocabulary
) -> None:
    text = CALLS[name]
    source = forced_calls(USE, CALL_FORMATS[name], {})
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert takes(vocabulary.grammar(source), ids)
    assert not takes(vocabulary.grammar(source), ids[:-1])
    assert not takes(vocabulary.grammar(source), tokenizer.encode(text.replace("2", '"x"')).ids)
    thought = tokenizer.encode("hm\n</think>\n\n" + text, add_special_tokens=False).ids
    assert takes(AfterThinking(vocabulary, {}).grammar(source), thought)
    parser = AnswerParser(AnswerFormat(CALL_FORMATS[name]), with_calls=True, types={})
    (call,) = [call for piece in (parser.feed(text), parser.finish()) for call in piece.calls if call.name]
    assert (call.name, parser.has_whole_calls) == ("book", True)


def test_marks_that_are_special_tokens_are_those_tokens(tokenizer: Tokenizer, vocabulary: GrammarVocabulary) -> None:
    form = CALL_FORMATS["json"]
    special = {"<tool_call>": 2, "</tool_call>": 3}
    ids = [2, *tokenizer.encode('\n{"name": "book", "arguments": {"city": "x"}}\n').ids, 3]
    assert takes(vocabulary.grammar(forced_calls(USE, form, special)), ids)
    assert not takes(vocabulary.grammar(forced_calls(USE, form, special)), tokenizer.encode(CALLS["json"]).ids)
    thinking = AfterThinking(vocabulary, {"</think>": 1})
    answer = [*tokenizer.encode("so").ids, tokenizer.token_to_id(END_OF_TURN), *tokenizer.encode("7").ids]
    assert takes(thinking.grammar(schema_grammar({"type": "integer"})), answer)
