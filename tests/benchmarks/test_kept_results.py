"""Kept results are whole pairs that benchmarks/README.md lists, and what the documentation names of them is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.report import RESULTS, ROOT

KEPT = sorted(RESULTS.glob("*.json"))
INDEX = ROOT / "benchmarks" / "README.md"
DOCS = (INDEX, ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
FACTS = ("what", "hardware", "date", "commit", "command", "versions", "summary", "metrics", "limits", "notes")


@pytest.mark.parametrize("path", KEPT, ids=[path.stem for path in KEPT])
def test_a_result_says_how_to_get_it_again(path: Path) -> None:
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert [name for name in FACTS if name not in kept] == []
    assert path.stem == f"{kept['what']}_{kept['hardware']['name']}_{kept['date']}"
    assert not kept["commit"].endswith("-dirty")
    assert kept["metrics"]
    assert all(type(value) in (int, float) for value in kept["metrics"].values())
    assert kept["limits"].keys() | kept["notes"].keys() <= kept["metrics"].keys()
    listed = re.findall(r"^\| ([^|]+) \| [^|]* \| [^|]* \|", path.with_suffix(".md").read_text("utf-8"), re.MULTILINE)
    assert listed[2:] == list(kept["metrics"]), "the Markdown's rows are the JSON's"


def test_every_result_is_in_the_index_once() -> None:
    linked = re.findall(r"\]\(results/(\S+)\.md\)", INDEX.read_text(encoding="utf-8"))
    assert sorted(linked) == [path.stem for path in KEPT]
    assert {path.stem for path in RESULTS.glob("*.md")} == set(linked)


def test_every_script_is_in_the_index() -> None:
    text = INDEX.read_text(encoding="utf-8")
    scripts = [path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")]
    assert [name for name in scripts if not re.search(rf"\b{name}\b", text)] == []


@pytest.mark.parametrize("path", DOCS, ids=[str(path.relative_to(ROOT)) for path in DOCS])
def test_results_that_the_documentation_names_are_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = [name.rstrip(".") for name in re.findall(r"\bresults/([\w.*+-]+)", text)]
    assert [name for name in named if not list(RESULTS.glob(name))] == []
