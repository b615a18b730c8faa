"""Chat templates where models keep them: in a file of their own, in the tokenizer's configuration, one or several."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from crosspool.errors import CheckpointError
from crosspool.server.chat import load_chat_template
from crosspool.server.template_files import named_templates
from tests.support.server_fixtures import tiny_frontend

NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
TOOLS = [{"name": "look_up"}]


def config(value: Any) -> dict[str, Any]:
    return {"chat_template": value}


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("A", {"default": "A"}),
        (NAMED, {"default": "plain", "tool_use": "{{ tools[0].name }}"}),
        ({"default": "A", "rag": "B"}, {"default": "A", "rag": "B"}),
        (None, {}),
    ],
)
def test_one_template_or_several_by_name(tmp_path: Path, value: Any, names: dict[str, str]) -> None:
    assert named_templates(tmp_path, config(value)) == names


@pytest.mark.parametrize("value", [5, ["A"], [{"template": "A"}], [{"name": "default", "template": None}], {"a": 1}])
def test_what_is_no_template_is_told_with_its_file(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template is neither"):
        named_templates(tmp_path, config(value))


def test_files_of_their_own_go_first_and_bring_others_beside_them(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps(config("older")))
    assert named_templates(tmp_path, {}) == {"default": "older"}
    assert named_templates(tmp_path, config("A")) == {"default": "A"}
    (tmp_path / "chat_template.jinja").write_text("B")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("C")
    assert named_templates(tmp_path, config("A")) == {"default": "B", "tool_use": "C"}


@pytest.mark.parametrize("content", ["[1]", "{", '{"chat_template": 1}'])
def test_a_broken_template_file_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "chat_template.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"chat_template\.json"):
        named_templates(tmp_path, {})


def test_without_a_default_there_is_none_and_the_names_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frontend = tiny_frontend(tmp_path, config=config([{"name": "rag", "template": "A"}]))
    assert frontend.template is None
    assert "rag" in caplog.text
    assert caplog.records[-1].levelno == logging.WARNING


def test_the_template_for_tools_is_used_with_tools_alone(tmp_path: Path) -> None:
    template = tiny_frontend(tmp_path, config=config(NAMED)).template
    assert template is not None
    assert template.render([], add_generation_prompt=True, kwargs={}) == "plain"
    assert template.render([], add_generation_prompt=True, kwargs={"tools": TOOLS}) == "look_up"
    mine = tmp_path / "mine.jinja"
    mine.write_text("mine")
    overridden = load_chat_template(tmp_path, tiny_frontend(tmp_path, config=config(NAMED)).tokenizer, mine)
    assert overridden is not None
    assert overridden.render([], add_generation_prompt=True, kwargs={"tools": TOOLS}) == "mine"


@pytest.mark.judge
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "look_up"}}]])
def test_the_same_of_several_is_taken_as_by_transformers(tmp_path: Path, tools: list[dict[str, Any]] | None) -> None:
    from transformers import AutoTokenizer

    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | tojson }}"}]
    frontend = tiny_frontend(tmp_path, config=config(named))
    assert frontend.template is not None
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    turns = [{"role": "user", "content": "hi"}]
    expected = theirs.apply_chat_template(turns, tools=tools, tokenize=False)
    assert frontend.template.render(turns, add_generation_prompt=False, kwargs={"tools": tools}) == expected
    theirs.save_pretrained(tmp_path / "again")  # in files of their own
    again = load_chat_template(tmp_path / "again", frontend.tokenizer)
    assert again is not None
    assert again.render(turns, add_generation_prompt=False, kwargs={"tools": tools}) == expected
