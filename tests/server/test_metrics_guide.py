"""docs/guides/metrics.md names every metric that the server exports, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import httpx2
from prometheus_client.parser import text_string_to_metric_families

GUIDE = Path(__file__).parent.parent.parent / "docs" / "guides" / "metrics.md"
SUFFIX = {"counter": "_total"}


async def test_the_guide_lists_what_is_exported(http: httpx2.AsyncClient) -> None:
    text = (await http.get("/metrics")).text
    exported = {
        family.name + SUFFIX.get(family.type, "")
        for family in text_string_to_metric_families(text)
        if not family.name.endswith("_created")
    }
    assert set(re.findall(r"crosspool:\w+", GUIDE.read_text())) == exported
