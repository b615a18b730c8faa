"""The dashboard in examples/grafana asks only for metrics and labels that the server exports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from crosspool.errors import CrossPoolError
from tests.support.fake_engine import FakeEngine, Script

BOARD = Path(__file__).parent.parent.parent / "examples" / "grafana" / "crosspool.json"
BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 4}


async def test_every_expression_is_about_an_exported_metric(http: httpx2.AsyncClient, engine: FakeEngine) -> None:
    await http.post("/v1/completions", json=BODY)
    engine.scripts["tiny"] = Script(refusal=CrossPoolError("no"))
    await http.post("/v1/completions", json=BODY)
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families((await http.get("/metrics")).text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    board = json.loads(BOARD.read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    expressions += [item["query"] for item in board["templating"]["list"] if item["type"] == "query"]
    asked = set()
    for expression in expressions:
        for name, matchers in re.findall(r"(crosspool:\w+)(?:\{([^}]*)\})?", expression):
            asked.add(name)
            assert name in labels, (name, expression)
            assert set(re.findall(r"(\w+)[=!]", matchers)) <= labels[name], expression
        for group in re.findall(r"by \(([^)]*)\)", expression):
            names = re.findall(r"crosspool:\w+", expression)
            assert set(group.split(", ")) <= set.union(*(labels[name] for name in names)), expression
    assert len(board["panels"]) >= 13
    assert len(asked) >= 20


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(BOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
