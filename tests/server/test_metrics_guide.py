"""docs/guides/metrics.md names every metric that the server exports, and no other than those of the sources."""

from __future__ import annotations

import re
from pathlib import Path

import httpx2
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parent.parent.parent
GUIDE = ROOT / "docs" / "guides" / "metrics.md"
SUFFIX = {"counter": "_total"}


async def test_the_guide_lists_what_is_exported(http: httpx2.AsyncClient) -> None:
    text = (await http.get("/metrics")).text
    exported = {
        family.name + SUFFIX.get(family.type, "")
        for family in text_string_to_metric_families(text)
        if not family.name.endswith("_created")
    }
    listed = set(re.findall(r"crosspool:\w+", GUIDE.read_text()))
    assert exported <= listed
    sources = "".join(path.read_text() for path in (ROOT / "src/crosspool/server").glob("*metrics.py"))
    for name in listed - exported:  # those of settings that this server has not
        assert re.search(rf"\b{name.removeprefix('crosspool:').removesuffix('_total')}\b", sources), name
