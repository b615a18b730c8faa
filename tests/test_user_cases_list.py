"""tests/user_cases.md names a test for every user case, or what the case waits for; and the tests it names exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
ROW = re.compile(r"^\| (A\d\d) \| ([^|]+) \| (.+) \|$", re.MULTILINE)
PLACE = re.compile(r"`([\w/]+\.py)(?:::(\w+))?`")


def rows() -> dict[str, str]:
    return {case: where for case, _, where in ROW.findall((TESTS / "user_cases.md").read_text())}


def test_all_51_cases_are_listed_once_and_in_order() -> None:
    cases = [case for case, _, _ in ROW.findall((TESTS / "user_cases.md").read_text())]
    assert cases == [f"A{number:02}" for number in range(1, 52)]


def test_every_case_has_a_test_that_exists_or_says_what_it_waits_for() -> None:
    for case, where in rows().items():
        places = PLACE.findall(where)
        assert places or re.search(r"waits? for: \w+", where), case
        for path, name in places:
            text = (TESTS / path).read_text()
            wanted = name or rf"test_\w*{case.lower()}_\w+"
            assert re.search(rf"^(?:async )?def {wanted}\(", text, re.MULTILINE), (case, path, name)
