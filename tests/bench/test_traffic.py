"""Which requests are sent when."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from crosspool.bench.by_model import arrivals, by_model, lengths, parse_length, parse_rate
from crosspool.bench.requests import planned_requests
from crosspool.bench.settings import BenchSettings
from crosspool.bench.traffic import ModelTraffic, drawn_requests, realised_rates, traced_requests
from crosspool.workload.arrivals import GammaBursts, Poisson, RateWindow, WindowedBursts
from crosspool.workload.lengths import Fixed, Recorded
from crosspool.workload.trace import make_trace

SHORT = Fixed(prompt_tokens=8, output_tokens=4)


def of(model, rate=2.0, num=400, cv=1.0):
    process = Poisson(rate_rps=rate) if cv == 1.0 else GammaBursts(rate_rps=rate, cv=cv)
    return ModelTraffic(model=model, arrivals=process, lengths=SHORT, num_prompts=num)


def test_each_model_gets_its_number_of_requests_at_its_rate():
    planned = drawn_requests([of("a", 2.0), of("b", 8.0)], seed=1)
    for model, rate in (("a", 2.0), ("b", 8.0)):
        times = [request.due_s for request in planned if request.model == model]
        assert len(times) == 400
        assert len(times) / times[-1] == pytest.approx(rate, rel=0.15)


def test_requests_are_numbered_in_order_of_time():
    planned = drawn_requests([of("a"), of("b")], seed=1)
    assert [request.index for request in planned] == list(range(800))
    assert all(a.due_s <= b.due_s for a, b in pairwise(planned))


def test_a_models_requests_do_not_change_with_the_models_beside_it():
    alone = [request.due_s for request in drawn_requests([of("a")], seed=1)]
    beside = [request.due_s for request in drawn_requests([of("b"), of("a")], seed=1) if request.model == "a"]
    assert alone == beside


def test_models_do_not_arrive_together():
    planned = drawn_requests([of("a"), of("b")], seed=1)
    times = {name: {request.due_s for request in planned if request.model == name} for name in "ab"}
    assert not times["a"] & times["b"]


def test_more_prompts_begin_with_the_same_ones():
    few = drawn_requests([of("a", num=100)], seed=3)
    many = drawn_requests([of("a", num=100, rate=2.0), of("b", num=50)], seed=3)
    assert [r.due_s for r in few] == [r.due_s for r in many if r.model == "a"]


def test_gaps_are_as_bursty_as_asked():
    times = np.array([request.due_s for request in drawn_requests([of("a", num=4000, cv=3.0)], seed=2)])
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx(3.0, rel=0.2)
    assert isinstance(arrivals(1.0, 0.25), GammaBursts)
    assert arrivals(1.0, 0.25).cv == 2.0  # shape 0.25
    assert arrivals(float("inf"), 1.0) is None


def test_a_closed_loop_is_due_at_once():
    traffic = ModelTraffic(model="a", arrivals=None, lengths=SHORT, num_prompts=5)
    assert [request.due_s for request in drawn_requests([traffic], seed=0)] == [0.0] * 5
    with pytest.raises(ValueError, match="no end to the requests of a"):
        ModelTraffic(model="a", arrivals=None, lengths=SHORT, duration_s=5.0)


def test_a_trace_is_replayed_faster_shorter_and_within_a_context():
    trace = make_trace([0.0, 1.0, 4.0], [0, 1, 0], [1000, 100, 10], [500, 50, 5], models=("x", "y"))
    planned = traced_requests(trace, speed=2.0, length_scale=0.1, duration_s=1.0, max_tokens=80)
    assert [(r.due_s, r.model, r.prompt_tokens, r.output_tokens) for r in planned] == [
        (0.0, "x", 30, 50),
        (0.5, "y", 10, 5),
    ]
    assert realised_rates(planned) == {"x": 0.0, "y": 2.0}, "x comes once, at the start"
    assert realised_rates(planned, 2.0) == {"x": 0.5, "y": 0.5}
    with pytest.raises(ValueError, match="trace speed is 0; it must be above 0"):
        traced_requests(trace, speed=0)


RECORDED = Recorded(prompt_tokens=np.array([900, 10]), output_tokens=np.array([5, 2000]))


@pytest.mark.parametrize("own", [SHORT, lengths((300.0, 1.0), (40.0, 2.0)), RECORDED], ids=["fixed", "drawn", "table"])
def test_requests_of_any_lengths_fit_a_context(own):
    traffic = ModelTraffic(model="a", arrivals=None, lengths=own, num_prompts=200)
    whole, cut = drawn_requests([traffic], 0), drawn_requests([traffic], 0, max_tokens=10)
    assert max(request.prompt_tokens + request.output_tokens for request in whole) > 10
    assert max(request.prompt_tokens + request.output_tokens for request in cut) == 10
    assert min(request.prompt_tokens for request in cut) == (6 if own is SHORT else 1)
    assert [request.output_tokens for request in cut] == [min(request.output_tokens, 9) for request in whole]


def test_values_may_differ_by_model():
    assert by_model("request-rate", ["1", "b=2"], ["a", "b"], parse_rate) == {"a": 1.0, "b": 2.0}
    with pytest.raises(ValueError, match="--request-rate names 'c'; the models are a, b"):
        by_model("request-rate", ["c=2"], ["a", "b"], parse_rate)
    with pytest.raises(ValueError, match="--request-rate is 'a=-1'"):
        by_model("request-rate", ["a=-1"], ["a"], parse_rate)


def test_lengths_of_a_mean_and_a_variation():
    assert parse_length("512~1.5") == (512.0, 1.5)
    with pytest.raises(ValueError, match="MEAN~CV"):
        parse_length("0")
    prompts, outputs = lengths((300.0, 1.0), (40.0, 0.0)).draw(np.random.default_rng(0), 2000)
    assert prompts.mean() == pytest.approx(300, rel=0.05)
    assert prompts.std() / prompts.mean() == pytest.approx(1.0, rel=0.2)
    assert set(outputs.tolist()) == {40}


def test_models_that_end_sooner_are_told_at_their_own_rates():
    traffic = [
        ModelTraffic(model=name, arrivals=arrivals(rate, 1.0), lengths=SHORT, num_prompts=400)
        for name, rate in (("fast", 8.0), ("slow", 1.0))
    ]
    rates = realised_rates(drawn_requests(traffic, seed=0))
    assert rates == {"fast": pytest.approx(8.0, rel=0.15), "slow": pytest.approx(1.0, rel=0.15)}


def test_a_run_may_begin_within_rates_by_time_of_day():
    windows = (RateWindow(start_s=0.0, rate_rps=0.0), RateWindow(start_s=600.0, rate_rps=5.0))
    bursts = WindowedBursts(windows=windows, window_s=600.0, period_s=1200.0)
    early, late = (
        ModelTraffic(model="a", arrivals=bursts, lengths=SHORT, duration_s=20.0, start_s=start)
        for start in (0.0, 700.0)
    )
    assert drawn_requests([early], seed=0) == []
    due = [request.due_s for request in drawn_requests([late], seed=0)]
    assert len(due) > 50
    assert 0 <= min(due) <= max(due) < 20
    counted = ModelTraffic(model="a", arrivals=bursts, lengths=SHORT, num_prompts=10, start_s=700.0)
    assert max(request.due_s for request in drawn_requests([counted], seed=0)) < 10


def test_models_beside_a_recorded_client_need_a_pace_too(tmp_path):
    (tmp_path / "rates.csv").write_text("client,t_s,rate_rps,cv,pattern,p1,p2\n7,0,2.0,1.0,G,1,1\n")
    hist = {"hist": [[0, 1.0]]}
    lengths = {"bin_edges": [10, 20], "clients": {"7": {"input": hist, "output": hist}}}
    (tmp_path / "lengths.json").write_text(json.dumps(lengths))
    common = {
        "base_url": ("http://x",),
        "duration_s": 30.0,
        "servegen_clients": ("a=7",),
        "servegen_rates": tmp_path / "rates.csv",
        "servegen_lengths": tmp_path / "lengths.json",
    }
    with pytest.raises(ValueError, match=r"b has no rate, .*--model"):
        planned_requests(BenchSettings(**common), ["a", "b"])
    assert {request.model for request in planned_requests(BenchSettings(**common), ["a"])} == {"a"}
    rated = BenchSettings(**common, request_rate=("a=2", "b=1"))
    assert {request.model for request in planned_requests(rated, ["a", "b"])} == {"a", "b"}
