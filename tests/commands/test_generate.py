"""`crosspool generate`: several directories at once, prompts from a file, no HTTP."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from crosspool import cli
from crosspool.commands.generate import read_prompts
from crosspool.errors import CrossPoolError
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    families = ("qwen3_moe", "deepseek_v2", "glm4_moe_lite")
    return [str(write_tiny_model(root / f"m{index}", family, num_layers=2)) for index, family in enumerate(families)]


def generate(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    options = ["--frame-bytes", "64KiB", "--kv-pool-bytes", "16MiB"]
    monkeypatch.setattr(sys, "argv", ["crosspool", "generate", *arguments, *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("layout", ["inprocess", "processes"])
def test_three_models_answer_a_file_of_prompts(
    models: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    layout: str,
) -> None:
    lines = [f"m{index}\tprompt {index}" for index in range(3)]
    lines.append(json.dumps({"model": "m1", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}))
    lines.append(json.dumps({"model": "m2", "prompt": [5, 6, 7], "temperature": 0}))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(lines) + "\n\n")
    choices = {"model": "m0", "prompt": "choose", "structured_outputs": {"choice": ["yes"]}}
    prompts.write_text(prompts.read_text() + json.dumps(choices) + "\n")
    options = ["--prompts", str(prompts), "--layout", layout, "--max-tokens", "6", "--seed", "1"]
    assert generate(monkeypatch, *models, *options, "--json") == 0
    found = {(item["model"], item["prompt"]): item for item in map(json.loads, capsys.readouterr().out.splitlines())}
    assert len(found) == 6
    assert found["m0", "choose"]["text"] == "yes"
    assert found["m1", "hi"]["usage"]["completion_tokens"] <= 3
    assert all(item["finish_reason"] in ("stop", "length") for item in found.values())
    assert generate(monkeypatch, *models, *options) == 0
    shown = capsys.readouterr().out
    places = [
        shown.index(f"[m{index}] prompt {index}{found[f'm{index}', f'prompt {index}']['text']}") for index in range(3)
    ]
    assert places == sorted(places)  # in the order of the file, and the same texts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nope\thello", ":1: the model 'nope' is not served here"),
        ('{"model": "m0", "prompt": "x", "temperature": 9}', ":1: temperature: "),
        ('{"model": "m0"}', ":1: has neither prompt nor messages"),
        ('{"model": ', ":1: not valid JSON"),
        ('{"model": "m0", "prompt": ["a", "b"]}', ":1: prompt must be one text"),
        ('{"model": "m0", "prompt": ' + "[" * 100_000, ":1: not valid JSON"),
        ('{"model": "m0", "prompt": "x", "n": 2}', ":1: n must be 1"),
        ("hello", ":1: model is missing"),
    ],
)
def test_a_bad_line_is_named(
    models: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    message: str,
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(line)
    assert generate(monkeypatch, *models[:2], "--prompts", str(prompts), "--layout", "inprocess") == 1
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text('a\tb\tc\n\n  {"prompt": "x"}\nplain\n')
    assert [item["body"] for item in read_prompts(path)] == [
        {"model": "a", "prompt": "b\tc"},
        {"prompt": "x"},
        {"prompt": "plain"},
    ]
    path.write_bytes("\ufeffa\tone\u2028two\fthree\r\n".encode())
    assert [item["body"] for item in read_prompts(path)] == [{"model": "a", "prompt": "one\u2028two\fthree"}]
    path.write_text("\n")
    with pytest.raises(CrossPoolError, match="holds no prompts"):
        read_prompts(path)
