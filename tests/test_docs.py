"""The documents that walk the code name files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"`((?:\w+/)+\w+\.\w+)`")


def absent(text: str) -> list[str]:
    """The paths in backquotes that lead to no file, from the repository's root or the package's."""
    roots = (ROOT, ROOT / "src" / "crosspool")
    return [name for name in NAMED.findall(text) if not any((root / name).is_file() for root in roots)]


@pytest.mark.parametrize("document", ["docs/architecture.md", "docs/concepts/glossary.md", "CONTRIBUTING.md"])
def test_every_file_a_document_names_exists(document):
    assert absent((ROOT / document).read_text(encoding="utf-8")) == []


def test_a_file_that_has_moved_is_found():
    assert absent("first `engine/engine.py`, then `engine/no_such_file.py`") == ["engine/no_such_file.py"]
