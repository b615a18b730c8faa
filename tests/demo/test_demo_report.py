"""The demo's figures: percentiles, the pool's peak beside separate caches, and what the views make of them."""

import io
import re

import pytest
from rich.console import Console

from crosspool.demo.client import Answer
from crosspool.demo.report import PoolSample, make_report
from crosspool.demo.scenario import DEMO_MODELS, DemoRequest, demo_model_dirs, demo_requests
from crosspool.demo.view import final_view, live_view


def _answer(model: str, arrivals_s: list[float], *, shown: bool = False) -> Answer:
    request = DemoRequest(model, "prompt", 0.0, len(arrivals_s), shown=shown)
    return Answer(request, 0.0, "some text", arrivals_s, len(arrivals_s), "length")


def _samples() -> list[PoolSample]:
    return [
        PoolSample(0.0, {"austen": 8, "holmes": 0}, ("austen", None)),
        PoolSample(0.1, {"austen": 2, "holmes": 7}, ("austen", "holmes")),
    ]


def test_the_shared_peak_is_below_the_sum_of_the_models_peaks():
    report = make_report(
        [_answer("austen", [0.1, 0.2]), _answer("holmes", [0.1, 0.3])], _samples(), frame_bytes=10, budget_frames=20
    )
    assert report.pool.peak_frames == 9
    assert report.pool.separate_caches_frames == 15
    assert report.pool.peak_frames_by_model == {"austen": 8, "holmes": 7}


def test_times_are_the_clients():
    report = make_report([_answer("austen", [0.5, 0.6, 0.9])], _samples(), frame_bytes=10, budget_frames=20)
    figures = report.models["austen"]
    assert figures.ttft_p50_ms == pytest.approx(500)
    assert figures.tbt_p50_ms == pytest.approx(200)
    assert figures.tokens_per_s == pytest.approx(3 / 0.9)
    assert report.tokens_per_s == pytest.approx(3 / 0.9)


@pytest.mark.parametrize("width", [60, 80, 150])
def test_both_views_fit_the_terminal(width):
    answers = [_answer(model, [0.1, 0.2], shown=True) for model in DEMO_MODELS]
    report = make_report(answers, _samples(), frame_bytes=1 << 16, budget_frames=250)
    for view in (live_view(answers, _samples(), 250, width), final_view(report, width)):
        console = Console(width=width, file=io.StringIO())
        console.print(view)
        lines = console.file.getvalue().splitlines()
        assert all(model in "\n".join(lines) for model in DEMO_MODELS)
        assert all(len(line) <= width for line in lines)
        assert "…" not in "".join(lines)
    assert any(re.fullmatch(r"│ holmes +▇+ +7 +│", line) for line in lines), "a row of the pool's panel was broken"


def test_columns_stay_in_place_whoever_answers_first():
    console = Console(width=80, file=io.StringIO())
    console.print(live_view([_answer("holmes", [0.1], shown=True)], _samples(), 250, 80))
    assert re.search("austen.*shakespeare.*holmes", console.file.getvalue())


def test_the_scenario_asks_every_packaged_model_and_shows_one_answer_of_each():
    requests = [request for burst in demo_requests() for request in burst]
    assert {request.model for request in requests} == set(demo_model_dirs())
    assert sorted(request.model for request in requests if request.shown) == sorted(DEMO_MODELS)
    assert all((path / "config.json").is_file() for path in demo_model_dirs().values())
