"""README's table says what the newest kept results say, and nothing else in README changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import readme_figures
from benchmarks.readme_figures import BEGIN, END, FIGURES, Figure, table, with_table
from benchmarks.report import RESULTS


def keep(folder: Path, name: str, metrics: dict[str, float], limits: dict[str, float] | None = None) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"metrics": metrics, "limits": limits or {}}))


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> Figure:
    figure = Figure("a step", "decode_cpu", ("ms", "other_ms"), "{0:.1f} ms, {most:.0f}", "{limit:.0f} ms asked")
    monkeypatch.setattr(readme_figures, "FIGURES", (figure,))
    return figure


def test_the_newest_result_counts(figure: Figure, tmp_path: Path) -> None:
    keep(tmp_path, "decode_cpu_2026-01-02", {"ms": 1.26, "other_ms": 7}, {"ms": 3.0})
    keep(tmp_path, "decode_cpu_2025-12-31", {"ms": 9.0, "other_ms": 9})
    keep(tmp_path, "decode_cpu_fast_2026-01-03", {"ms": 8.0, "other_ms": 8})  # another result, whose name begins alike
    left_out: list[str] = []
    row = table(tmp_path, left_out).splitlines()[-1]
    link = "[decode_cpu](benchmarks/results/decode_cpu_2026-01-02.md)"
    assert row == f"| a step | 1.3 ms, 7 | 3 ms asked | {link} |"
    assert left_out == []


def test_a_limit_that_is_not_kept_is_not_told(figure: Figure, tmp_path: Path) -> None:
    keep(tmp_path, "decode_cpu_2026-01-02", {"ms": 1.0, "other_ms": 2})
    assert "| 1.0 ms, 2 |  |" in table(tmp_path, [])


def test_what_is_not_there_is_left_out_and_told(figure: Figure, tmp_path: Path) -> None:
    left_out: list[str] = []
    assert len(table(tmp_path, left_out).splitlines()) == 2
    keep(tmp_path, "decode_cpu_2026-01-02", {"ms": 1.0})
    assert len(table(tmp_path, left_out).splitlines()) == 2
    assert left_out == ["decode_cpu: no result", "decode_cpu_2026-01-02.json: no other_ms"]


def test_only_the_lines_between_the_marks_change() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nbehind\n"
    made = with_table(text, "new")
    assert made == f"before\n{BEGIN}\n\nnew\n\n{END}\nbehind\n"
    assert with_table(made, "new") == made
    with pytest.raises(ValueError, match="once each"):
        with_table("no marks", "new")


def test_kept_results_have_most_of_the_figures() -> None:
    left_out: list[str] = []
    made = table(RESULTS, left_out)
    assert len(made.splitlines()) - 2 + len(left_out) == len(FIGURES)
    assert len(left_out) < len(FIGURES) / 2, left_out
