"""Ranks of two pools and of the baselines: who has how many, where, and with how much memory."""

from __future__ import annotations

from dataclasses import replace

import httpx2
import pytest

from crosspool.config import DeploymentConfig, ModelConfig, SchedulingConfig, ServerConfig
from crosspool.deployment.engine_and_cluster import cluster_config, engine_config
from crosspool.deployment.launch import start_engine
from crosspool.deployment.prefill_room import BESIDE_BYTES, prefill_summary, with_prefill_room
from crosspool.deployment.prepared_model import demo_models, prepare_models, whole_models
from crosspool.deployment.ranks import (
    hosts,
    kv_bytes_of_each,
    kv_ranks,
    kv_ranks_of,
    num_lanes,
    prefill_ranks,
    weights_ranks,
    weights_ranks_of,
)
from crosspool.errors import CrossPoolError
from crosspool.models.whole_size import whole_bytes
from crosspool.pools_config import PoolsConfig
from crosspool.units import GiB, KiB, MiB
from tests.support.live_deployment import live_deployment

MODELS = tuple(ModelConfig(source=f"/models/{name}") for name in "abc")


def deployment(baseline=None, models=MODELS, **pools):
    pools = {"kv_pool_bytes": 12 * MiB, "frame_bytes": 64 * KiB, **pools}
    return DeploymentConfig(models=models, pools=PoolsConfig(baseline=baseline, **pools))


def test_two_pools_stay_what_they_were():
    config = deployment(num_kv_ranks=2, num_weights_ranks=3)
    assert (kv_ranks(config), weights_ranks(config)) == (("kv0", "kv1"), ("w0", "w1", "w2"))
    assert hosts(config) == ()
    assert kv_ranks_of(MODELS[1], config) == ("kv1", "kv0")
    assert kv_bytes_of_each(config) == 12 * MiB
    assert num_lanes(config) == (2, 1)


def test_prefill_ranks_have_a_lane_each():
    config = deployment(prefill="dedicated", num_prefill_ranks=2)
    assert prefill_ranks(config) == ("p0", "p1")
    assert num_lanes(config) == (2, 2)
    assert engine_config(config).prefill_ranks == cluster_config(config).prefill_ranks == ("p0", "p1")
    assert prefill_ranks(deployment()) == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_prefill_ranks=2), "prefill_ranks is 2 with prefill inline; set prefill dedicated"),
        (dict(prefill="dedicated", num_prefill_ranks=0), "prefill_ranks is 0; it must be at least 1"),
        (dict(prefill_gpus=(1,)), r"prefill_gpus is \[1\] with prefill inline; set prefill dedicated"),
        (
            dict(prefill="dedicated", prefill_pool_bytes=8),
            "prefill_pool_bytes is 8 with backend numpy, .* leave it out",
        ),
        (
            dict(prefill="dedicated", backend="cuda", prefill_gpus=(1, 2)),
            "prefill_gpus names 2 GPUs for 1 prefill ranks; give one for each",
        ),
        (
            dict(prefill="dedicated", backend="cuda", transport="nvshmem"),
            "transport is nvshmem with prefill dedicated, .*; use auto",
        ),
        (
            dict(prefill="dedicated", backend="cuda", prefill_pool_bytes=0),
            "prefill_pool_bytes is 0; it must be above 0, or left out",
        ),
        (dict(prefill="dedicated", backend="cuda", prefill_gpus=(-1,)), r"prefill_gpus is \[-1\]; GPUs are numbered"),
        (dict(prefill="dedicated", baseline="static"), "prefill is dedicated with baseline static, .* use inline"),
    ],
)
def test_prefill_ranks_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        deployment(**changes)


def test_static_models_lie_whole_on_one_device_with_memory_of_their_own():
    config = deployment("static")
    placed = [(*kv_ranks_of(model, config), *weights_ranks_of(model, config)) for model in MODELS]
    assert placed == [("kv0", "w0"), ("kv1", "w1"), ("kv2", "w2")]
    assert hosts(config) == (("kv0", "w0", "kv2", "w2"), ("kv1", "w1"))  # two devices, as two pools of one rank each
    for ranks in placed:
        assert any(set(ranks) <= set(host) for host in hosts(config)), "a static model crosses between devices"
    assert kv_bytes_of_each(config) == 4 * MiB
    assert num_lanes(config) == (3, 3)


def test_elastic_models_lie_everywhere_and_share_the_memory():
    config = deployment("elastic", num_weights_ranks=3)
    assert hosts(config) == tuple((f"kv{device}", f"w{device}") for device in range(4))
    for model in MODELS:
        assert set(kv_ranks_of(model, config)) == set(kv_ranks(config))
        assert weights_ranks_of(model, config) == weights_ranks(config)
    assert kv_bytes_of_each(config) == 3 * MiB
    assert num_lanes(config) == (12, 12)


@pytest.mark.parametrize("baseline", ["static", "elastic"])
@pytest.mark.parametrize("num_weights_ranks", [1, 3])
def test_a_baseline_has_no_more_memory_than_the_pools(baseline, num_weights_ranks):
    config = deployment(baseline, num_weights_ranks=num_weights_ranks)
    assert kv_bytes_of_each(config) * len(kv_ranks(config)) <= config.pools.kv_pool_bytes
    assert engine_config(config).kv_budget_bytes == kv_bytes_of_each(config)
    assert cluster_config(config).order == "ticket"
    assert len(cluster_config(config).all_hosts) <= 1 + num_weights_ranks


def test_what_cannot_be_is_refused_in_one_line():
    with pytest.raises(CrossPoolError, match="kv_pool_bytes is 131072, of which each KV rank of baseline static gets"):
        kv_bytes_of_each(deployment("static", kv_pool_bytes=128 * KiB))
    with pytest.raises(ValueError, match="d has no memory of its own in baseline static"):
        kv_ranks_of(ModelConfig(source="/models/d"), deployment("static"))
    with pytest.raises(CrossPoolError, match=r"control is resident with baseline static; .* so use graphs"):
        cluster_config(deployment("static", backend="cuda", control="resident"))
    with pytest.raises(CrossPoolError, match="layout is inprocess with baseline elastic on GPUs; use processes"):
        cluster_config(deployment("elastic", backend="cuda", layout="inprocess"))


@pytest.mark.parametrize("baseline", [None, "static", "elastic"])
def test_gpus_get_ready_for_prompts_in_the_lanes_behind_those_of_decode(baseline):
    config = deployment(baseline, backend="cuda")
    assert cluster_config(config).first_prompt_lane == num_lanes(config)[0]


def test_pools_may_share_gpus_and_then_processes():
    config = deployment(backend="cuda", num_weights_ranks=3, num_gpus=2)
    cluster = cluster_config(config)
    assert cluster.all_hosts == (("kv0", "w1"), ("w0", "w2"))
    assert cluster.device_of == {"kv0": 0, "w1": 0, "w0": 1, "w2": 1}
    assert not cluster.joins_halves, "two pools stay two on one GPU"
    assert cluster_config(deployment(backend="cuda", num_gpus=2)).all_hosts == (("kv0",), ("w0",))
    with pytest.raises(
        CrossPoolError, match=r"control is resident with kv0 and w0 on one GPU; .* use graphs, or a GPU for each"
    ):
        cluster_config(deployment(backend="cuda", num_gpus=1, control="resident"))
    with pytest.raises(CrossPoolError, match="control is resident with w0 and p0 on one GPU"):
        cluster_config(deployment(backend="cuda", prefill="dedicated", prefill_gpus=(1,), control="resident"))
    with pytest.raises(ValueError, match="gpus is 2 with backend numpy, which uses none"):
        deployment(num_gpus=2)


@pytest.mark.parametrize(
    ("changes", "hosts_wanted", "devices_wanted"),
    [
        ({}, (("kv0",), ("w0",), ("p0",)), (0, 1, 2)),
        (dict(num_gpus=2), (("kv0", "w0"), ("p0",)), (0, 0, 1)),
        (dict(num_gpus=1), (("kv0", "w0", "p0"),), (0, 0, 0)),
        (dict(prefill_gpus=(0,)), (("kv0", "p0"), ("w0",)), (0, 1, 0)),
        (dict(num_gpus=1, prefill_gpus=(3,)), (("kv0", "w0"), ("p0",)), (0, 0, 3)),
    ],
)
def test_prefill_ranks_get_the_last_gpus_or_those_that_they_are_given(changes, hosts_wanted, devices_wanted):
    config = deployment(backend="cuda", prefill="dedicated", **changes)
    cluster = cluster_config(config)
    assert cluster.all_hosts == hosts_wanted
    assert tuple(cluster.device_of[rank] for rank in ("kv0", "w0", "p0")) == devices_wanted


def test_several_prefill_ranks_share_what_is_left():
    config = deployment(backend="cuda", prefill="dedicated", num_prefill_ranks=2, num_weights_ranks=2, num_gpus=4)
    assert cluster_config(config).device_of == {"kv0": 0, "w0": 1, "w1": 0, "p0": 2, "p1": 3}


def test_prefill_ranks_hold_no_model_whose_prompts_they_cannot_compute():
    first, second, third = demo_models()
    models = (first, replace(second, kv_split="tokens"), replace(third, kv_split="tokens"))
    config = deployment(prefill="dedicated", num_kv_ranks=2, kv_split="one", models=models)
    prepared = prepare_models(config)
    assert [model.served.prefill_ranks for model in prepared] == [("p0",), (), ()]
    assert whole_models(prepared) == [prepared[0].served.spec]
    with pytest.raises(CrossPoolError, match=r"prefill is dedicated, and no model has prompts .* or prefill inline"):
        start_engine(config, prepared[1:])


def test_a_prefill_ranks_room_is_two_of_the_largest_model_unless_it_is_given():
    config = deployment(backend="cuda", prefill="dedicated", models=demo_models())
    models = [model.served.spec for model in prepare_models(config)]
    largest = max(map(whole_bytes, models))
    room = with_prefill_room(config, models).pools.prefill_pool_bytes
    assert room is not None
    assert 2 * largest <= room < 2 * largest + GiB
    given = replace(config, pools=replace(config.pools, prefill_pool_bytes=5 * GiB))
    assert with_prefill_room(given, models) == given
    assert cluster_config(given).prefill_pool_bytes == engine_config(given).prefill_pool_bytes == 5 * GiB
    line = prefill_summary(with_prefill_room(config, models), models)
    assert line is not None
    assert line.startswith("prompts run on p0 on GPU 2: ")
    assert "of its GPU for those in place, 3 of the largest at once; bringing one in takes up to 0.0 s" in line
    inline = deployment(backend="cuda", models=demo_models())
    assert prefill_summary(inline, models) is None
    assert with_prefill_room(inline, models) == inline
    assert with_prefill_room(config, []) == config, "no model says how much"


def test_a_prefill_ranks_room_is_no_more_than_its_gpu_has():
    models = [prepared.served.spec for prepared in prepare_models(deployment(models=demo_models()))]
    own, shared = (
        deployment(backend="cuda", prefill="dedicated", models=demo_models(), **pools)
        for pools in ({}, {"num_gpus": 1})
    )

    def room(config, *gpus):
        return with_prefill_room(config, models, gpus).pools.prefill_pool_bytes

    assert room(own, GiB, GiB, 80 * GiB) == room(own, GiB, GiB) == GiB, "two of the largest"
    small = BESIDE_BYTES + max(map(whole_bytes, models))
    assert room(own, GiB, GiB, small) == max(map(whole_bytes, models))
    with pytest.raises(
        CrossPoolError, match=r"^the largest model takes .* whole, and GPU 2 of p0 has .*; use a larger"
    ):
        room(own, GiB, GiB, small - 1)
    assert room(shared, GiB) == GiB, "what pools leave of a GPU that they share is not known"


def test_a_weights_rank_beside_the_kv_rank_may_take_less():
    uneven = dict(num_weights_ranks=2, num_gpus=2, weights_shares=(3.0, 1.0))
    config = deployment(backend="cuda", models=demo_models(), **uneven)
    assert cluster_config(config).all_hosts == (("kv0", "w1"), ("w0",))
    assert {model.served.placement.weights_shares for model in prepare_models(config)} == {(3.0, 1.0)}
    for wrong, message in (
        (dict(weights_shares=(3.0, 1.0)), "has 2 shares for 1 weights ranks"),
        (dict(weights_shares=(0.0,)), "each must be a number above 0"),
        (dict(weights_shares=(float("inf"),)), "each must be a number above 0"),
        (dict(weights_shares=(1.0,), baseline="static"), "baseline static, which has no pools"),
    ):
        with pytest.raises(ValueError, match=message):
            deployment(**wrong)


def test_a_baseline_has_as_many_devices_as_gpus():
    config = deployment("elastic", backend="cuda", num_gpus=1)
    assert kv_ranks(config) == ("kv0",)
    assert cluster_config(config).all_hosts == (("kv0.0", "w0.0"), ("kv0.1", "w0.1"), ("kv0.2", "w0.2"))
    assert cluster_config(deployment("static", backend="cuda", num_gpus=1)).all_hosts == (
        ("kv0", "w0", "kv1", "w1", "kv2", "w2"),
    )


def test_static_models_on_gpus_run_undivided_on_their_gpu():
    cluster = cluster_config(deployment("static", backend="cuda", frame_bytes=64 * KiB))
    assert cluster.joins_halves
    assert cluster.device_of == {"kv0": 0, "w0": 0, "kv1": 1, "w1": 1, "kv2": 0, "w2": 0}
    assert [cluster.first_frame(rank) for rank in cluster.kv_ranks] == [64 * number for number in range(3)]


def test_elastic_models_on_gpus_have_processes_of_their_own_and_share_the_memory_of_their_gpu():
    config = deployment("elastic", backend="cuda", frame_bytes=64 * KiB)
    assert [(*kv_ranks_of(model, config), *weights_ranks_of(model, config)) for model in MODELS] == [
        ("kv0", "w0"),
        ("kv1", "w1"),
        ("kv0", "w0"),
    ]
    assert num_lanes(config) == (3, 3)
    assert kv_bytes_of_each(config) == 6 * MiB
    cluster = cluster_config(config)
    assert cluster.all_hosts == (("kv0.0", "w0.0"), ("kv0.1", "w0.1"), ("kv1.0", "w1.0"))
    assert cluster.device_of == {"kv0.0": 0, "kv0.1": 0, "kv1.0": 1, "w0.0": 0, "w0.1": 0, "w1.0": 1}
    assert cluster.arenas == (("kv0.0", "kv0.1"), ("kv1.0",))
    assert [cluster.first_frame(rank) for rank in cluster.kv_ranks] == [0, 0, 96]


def test_elastic_models_with_latent_attention_are_replicas():
    """No engine without pools spreads one sequence's latent cache over GPUs by tokens."""
    splits = {
        model.served.spec.layers[0].attention.__class__.__name__: model.served.kv_split
        for model in prepare_models(deployment("elastic", demo_models()))
    }
    assert splits == {"GQASpec": "heads", "MLASpec": "one"}


def answers(baseline):
    """What each demo model says, the longest context it gives a request, and what a model more is answered with."""
    config = DeploymentConfig(
        models=demo_models(),
        pools=PoolsConfig(layout="inprocess", baseline=baseline, kv_pool_bytes=3 * MiB, frame_bytes=64 * KiB),
        scheduling=SchedulingConfig(max_num_batched_tokens=64),
        server=ServerConfig(admin_api_keys=("k",)),
    )
    with live_deployment(config) as live, httpx2.Client(base_url=live.url, timeout=60) as client:
        cards = client.get("/v1/models").json()["data"]
        texts = {}
        for card in cards:
            body = {"model": card["id"], "prompt": "It was a truth that", "max_tokens": 24, "temperature": 0}
            texts[card["id"]] = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        more = client.post(
            "/admin/models/more/load", json={"path": demo_models()[0].source}, headers={"Authorization": "Bearer k"}
        )
        return texts, {card["id"]: card["max_model_len"] for card in cards}, more


def test_every_layout_gives_the_same_answers_and_static_the_shortest_context():
    texts, contexts, _ = answers(None)
    static_texts, static_contexts, refused = answers("static")
    elastic_texts, elastic_contexts, accepted = answers("elastic")
    assert texts == static_texts == elastic_texts
    assert all(len(text) > 20 for text in texts.values())
    for name in contexts:
        assert static_contexts[name] < contexts[name]
        assert elastic_contexts[name] <= contexts[name]
    assert refused.status_code == 400
    assert "no memory of its own" in refused.json()["error"]["message"]
    assert accepted.status_code == 200


def test_a_server_with_a_prefill_rank_answers_and_shows_it():
    answers = []
    for prefill in ("inline", "dedicated"):
        config = deployment(models=demo_models()[:1], prefill=prefill, layout="inprocess")
        name = config.models[0].served_name
        body = {"model": name, "prompt": "the quick brown fox " * 12, "max_tokens": 6, "temperature": 0}
        with live_deployment(config) as live:
            reply = httpx2.post(f"{live.url}/v1/completions", json=body, timeout=60)
            assert reply.status_code == 200, reply.text
            answers.append(reply.json()["choices"][0]["text"])
            workers = httpx2.get(f"{live.url}/health").json()["workers"]
            assert ("p0" in workers) == (prefill == "dedicated"), workers
            metrics = httpx2.get(f"{live.url}/metrics").text
            assert ('crosspool:prefill_switches_total{rank="p0"} 1.0' in metrics) == (prefill == "dedicated")
    assert answers[0] == answers[1]
