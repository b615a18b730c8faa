"""Documents name files that exist, and the glossary has each word once."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TERM = re.compile(r"\*\*(.+?)\*\*")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md"])
NAMED = re.compile(r"`((?:\w+/)+\w+\.\w+)`")


def absent(text: str) -> list[str]:
    """The paths in backquotes that lead to no file, from the repository's root, the package's or its CUDA backend's."""
    package = ROOT / "src" / "crosspool"
    roots = (ROOT, package, package / "backends" / "cuda")
    return [name for name in NAMED.findall(text) if not any((root / name).is_file() for root in roots)]


@pytest.mark.parametrize("document", [str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_every_file_a_document_names_exists(document):
    assert absent((ROOT / document).read_text(encoding="utf-8")) == []


def test_a_file_that_has_moved_is_found():
    assert absent("first `engine/engine.py`, then `engine/no_such_file.py`") == ["engine/no_such_file.py"]


def repeated_terms(glossary: str) -> list[str]:
    """Words that several entries are headed by."""
    heads = [term for line in glossary.splitlines() if line.startswith("**") for term in TERM.findall(line)]
    return [term for term, count in Counter(heads).items() if count > 1]


def test_a_word_of_the_glossary_has_one_entry():
    assert repeated_terms((ROOT / "docs/concepts/glossary.md").read_text(encoding="utf-8")) == []
    assert repeated_terms("**place**\n:   A GPU.\n\n**spot**, **place**\n:   Of a page.\n") == ["place"]
