"""YAML files that people write: keys stand there once, and what is wrong is one line with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from crosspool.deployment.yaml_file import read_mapping


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.yaml"


def test_a_mapping_with_anchors_merges_and_overridden_keys(path: Path) -> None:
    path.write_text("a: &one {x: 1, y: 2}\nb: {<<: *one, y: 3}\n1: number\n'1': text\n")
    found = {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, 1: "number", "1": "text"}
    assert read_mapping(path, "such as a: 1") == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [a]\nport: 1\nmodels: [b]\n", "line 3, column 1: 'models' stands there a second time; join the two"),
        ("models:\n  - path: a\n    name: b\n    path: c\n", "line 4, column 5: 'path' stands there a second time"),
        ("a: [1", "line 1, column 6: expected ',' or ']', but got '<stream end>'"),
        ("\tport: 1", "line 1, column 1: found character '\\t' that cannot start any token"),
        ("a: {[1]: 2}", "line 1, column 5: found unhashable key"),
        ("x: " + "[" * 5000, "it is nested too deeply"),
        ("- a\n", "holds a list; it must be a mapping such as a: 1"),
    ],
)
def test_what_is_wrong_is_one_line_with_its_place(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match=r"file\.yaml") as error:
        read_mapping(path, "such as a: 1")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_no_text_and_what_is_no_file(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not valid YAML: 'utf-8' codec"):
        read_mapping(path, "such as a: 1")
    with pytest.raises(ValueError, match=r"cannot read .*: Is a directory"):
        read_mapping(path.parent, "such as a: 1")


def test_an_empty_file_is_an_empty_mapping(path: Path) -> None:
    path.write_text("# nothing\n")
    assert read_mapping(path, "such as a: 1") == {}
