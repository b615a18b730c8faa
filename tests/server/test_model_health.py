"""Health of each model and each worker, told apart by their own progress; quick even when the server is saturated."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from crosspool.engine.stats import EngineStats, LaneStats, ModelStats
from crosspool.server.health import health_of, judge_model, judge_workers
from tests.support.awaited import soon
from tests.support.fake_engine import FakeEngine, Script
from tests.support.live_server import live_server
from tests.support.server_fixtures import fake_app

INFO = FakeEngine(("tiny",)).model("tiny")  # on kv0 and w0


def moment(
    lane_since_s: float | None = None, ranks_down: dict[str, float] | None = None, **load: object
) -> EngineStats:
    """An engine at 100 s; `load` is what the model has, `lane_since_s` when its step in flight began."""
    stats = replace(FakeEngine(("tiny",)).stats(), now_s=100.0, ranks_down=ranks_down or {})
    model: ModelStats = replace(stats.models[0], **load)
    lane = LaneStats(
        lane=0, phase="decode", state="running", model="tiny", step_seq=1, num_seqs=1, since_s=lane_since_s
    )
    return replace(stats, models=(model,), lanes=() if lane_since_s is None else (lane,))


@pytest.mark.parametrize(
    ("stats", "state", "for_s"),
    [
        (moment(), "idle", None),
        (moment(num_queued=3), "busy", None),
        (moment(num_decoding=1, busy_since_s=99.0), "busy", 1.0),
        (moment(num_decoding=1, busy_since_s=60.0), "stuck", 40.0),
        (moment(num_decoding=1, busy_since_s=99.0, ranks_down={"w0": 95.0}), "recovering", 5.0),
        (moment(ranks_down={"kv0": 60.0}), "recovering", 40.0),
        (moment(ranks_down={"kv0": 39.0}), "stuck", 61.0),
        (replace(moment(ranks_down={"kv0": 60.0}), recovery_timeout_s=5.0), "stuck", 40.0),
        (replace(moment(ranks_down={"kv0": 75.0}), recovery_timeout_s=5.0), "recovering", 25.0),
        (moment(ranks_down={"w0": 90.0, "kv0": 39.0}), "stuck", 61.0),  # by the one that is away longest
        (moment(ranks_down={"kv0": 39.0, "w0": 90.0}), "stuck", 61.0),
        (moment(ranks_down={"w7": 60.0}), "idle", None),
        (replace(moment(ranks_down={"w0": 99.0}), ranks_given_up={"w0": "w0 does not come back"}), "stuck", 1.0),
        (replace(moment(ranks_down={"w0": 99.0, "kv0": 60.0}), ranks_given_up={"w0": "gone"}), "stuck", 1.0),
        (replace(moment(ranks_down={"w0": 99.0}), ranks_given_up={"w7": "gone"}), "recovering", 1.0),
        (replace(moment(ranks_down={"w0": 60.0}), held_again={"w0": ("tiny",)}), "idle", None),
        (replace(moment(ranks_down={"w0": 60.0}), held_again={"w0": ("else",)}), "recovering", 40.0),
    ],
)
def test_a_model_is_judged_by_its_own_steps_and_ranks(stats: EngineStats, state: str, for_s: float | None) -> None:
    found = judge_model(INFO, stats)
    assert (found.state, found.for_s) == (state, for_s)


@pytest.mark.parametrize("state", ["loading", "draining", "failed"])
def test_a_model_that_may_not_be_asked_says_so(state: str) -> None:
    found = judge_model(replace(INFO, state=state, error="no weights"), moment(num_decoding=1))
    assert (found.state, found.is_live) == (state, False)


def test_a_model_over_several_kv_ranks_depends_on_all_of_them() -> None:
    split = replace(INFO, kv_peers=("kv1",), kv_split="tokens")
    stats = moment(ranks_down={"kv1": 99.0})
    assert (judge_model(INFO, stats).state, judge_model(split, stats).state) == ("idle", "recovering")
    assert {"kv0", "kv1", "w0"} == set(judge_workers([split], stats))


def test_a_model_with_kv_of_its_own_on_several_ranks_answers_while_one_of_them_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    homes, engine = replace(INFO, kv_peers=("kv1",)), FakeEngine(("tiny",))

    def judged(down: dict[str, float], *given_up: str) -> list[tuple[str, float | None]]:
        stats = replace(moment(ranks_down=down), ranks_given_up=dict.fromkeys(given_up, "gone"))
        monkeypatch.setattr(engine, "models", lambda: [homes])
        monkeypatch.setattr(engine, "stats", lambda: stats)
        return [(found.state, found.for_s) for found in (judge_model(homes, stats), health_of(engine))]

    assert judged({"kv1": 0.0}, "kv1") == [("idle", None)] * 2
    assert judged({"kv0": 0.0}, "kv0") == [("idle", None)] * 2
    assert judged({"kv0": 10.0, "kv1": 95.0}) == [("recovering", 5.0)] * 2
    assert judged({"kv0": 95.0, "kv1": 98.0}, "kv1") == [("recovering", 5.0)] * 2
    assert judged({"kv0": 95.0, "kv1": 98.0}, "kv0", "kv1") == [("stuck", 2.0)] * 2
    assert judged({"kv1": 10.0, "w0": 99.0}, "kv1") == [("recovering", 1.0)] * 2
    assert judged({"w0": 99.0}, "w0") == [("stuck", 1.0)] * 2
    assert judged({"w9": 99.0}) == [("idle", None), ("recovering", 1.0)], "no model's rank, as far as is known"


def test_a_prefill_rank_that_is_away_is_shown_and_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    info = replace(INFO, prefill_ranks=("p0",))
    stats = moment(lane_since_s=60.0, ranks_down={"p0": 20.0})
    assert judge_workers([info], stats)["p0"].state == "stuck"
    assert judge_workers([info], moment(lane_since_s=60.0))["p0"].state == "idle", "decode is none of its work"
    assert judge_model(info, stats).state == "idle"
    engine = FakeEngine(("tiny",))
    monkeypatch.setattr(engine, "models", lambda: [info])
    monkeypatch.setattr(engine, "stats", lambda: stats)
    assert health_of(engine).is_live
    monkeypatch.setattr(engine, "stats", lambda: moment(ranks_down={"w0": 20.0}))
    assert health_of(engine).state == "stuck"


def test_workers_are_told_apart() -> None:
    other = replace(INFO, name="other", weights_ranks=("w1",), kv_rank="kv1", state="loading")

    def states(stats: EngineStats) -> dict[str, str]:
        return {rank: found.state for rank, found in judge_workers([INFO, other], stats).items()}

    assert states(moment()) == {"kv0": "idle", "w0": "idle", "kv1": "loading", "w1": "loading"}
    assert states(moment(lane_since_s=99.0))["w0"] == "busy"
    assert states(moment(lane_since_s=60.0)) == {"kv0": "stuck", "w0": "stuck", "kv1": "loading", "w1": "loading"}
    assert states(moment(ranks_down={"w1": 99.0}))["w1"] == "recovering"


async def test_one_model_is_asked_by_name_or_alias_and_without_a_key(engine: FakeEngine, tmp_path: Path) -> None:
    engine.states["other"] = "loading"
    with live_server(fake_app(engine, tmp_path, api_keys=("k",))) as url:
        async with httpx2.AsyncClient(base_url=url) as http:
            body = (await http.get("/health")).json()
            assert body["models"] == {"tiny": {"status": "idle"}, "other": {"status": "loading"}}
            assert body["workers"] == {"kv0": {"status": "loading", "detail": "other"}, "w0": body["workers"]["kv0"]}
            for name, status in (("tiny", 200), ("nickname", 200), ("other", 503), ("nope", 404)):
                assert (await http.get(f"/health/models/{name}")).status_code == status
            engine.busy_for_s = 31.0
            assert (await http.get("/health/models/tiny")).status_code == 200  # the others' silence is not its own


async def test_health_answers_within_a_second_beside_two_hundred_streams(engine: FakeEngine, tmp_path: Path) -> None:
    engine.scripts = {name: Script(delay_s=0.02) for name in engine.scripts}
    engine.max_queue = 1000
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 1000, "stream": True}
    with live_server(fake_app(engine, tmp_path)) as url:
        limits = httpx2.Limits(max_connections=300)
        async with httpx2.AsyncClient(base_url=url, limits=limits, timeout=60) as http:
            streams = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(200)]
            await soon(lambda: len(engine.running) == 200)
            times = []
            for _ in range(5):
                started = time.process_time()  # of the server and its clients, whatever else the machine does
                assert (await http.get("/health")).status_code == 200
                times.append(time.process_time() - started)
            assert sorted(times)[2] < 1.0, times
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
