"""Choices of chats and completions: what a stream shows of an output, and what it leaves out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from crosspool.core import FinishReason
from crosspool.server.choices import ChatShape, CompletionShape
from tests.support.outputs import an_output
from tests.support.server_fixtures import tiny_frontend


@pytest.mark.parametrize("shape_type", [ChatShape, CompletionShape])
def test_an_output_whose_text_is_held_back_shows_nothing(
    shape_type: type[ChatShape] | type[CompletionShape], tmp_path: Path
) -> None:
    shape = shape_type(tiny_frontend(tmp_path).tokenizer)
    assert shape.piece(0, replace(an_output(), text="")) is None
    shown = shape.piece(3, an_output())
    assert shown is not None
    assert (shown["index"], shown["finish_reason"]) == (3, None)
    ended = shape.piece(0, replace(an_output(FinishReason.LENGTH), text=""))
    assert ended is not None
    assert ended["finish_reason"] == "length"


def test_a_chats_last_piece_without_text_has_an_empty_delta(tmp_path: Path) -> None:
    shape = ChatShape(tiny_frontend(tmp_path).tokenizer)
    last = shape.piece(0, replace(an_output(FinishReason.STOP), text=""))
    assert last is not None
    assert last["delta"] == {}
    assert (shape.piece(0, an_output(FinishReason.STOP)) or {})["delta"] == {"content": "x"}
