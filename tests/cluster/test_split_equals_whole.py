"""Real models over the cluster give what the undivided model gives, bit for bit, log-probabilities included."""

import itertools
from dataclasses import replace

import pytest
from threadpoolctl import threadpool_limits

from crosspool.cluster.base import ModelPlacement, ModelReady, StepDone
from crosspool.cluster.config import ClusterConfig
from crosspool.models.directory import read_model_dir
from tests.support.lane_driver import wait_for
from tests.support.monolithic import MonolithicModel
from tests.support.real_cluster import running
from tests.support.scripted_steps import FRAME_BYTES, NUM_FRAMES, PAGE_TOKENS, scripted_steps
from tests.support.stepped_cluster import SteppedCluster
from tests.support.tiny_models import CONFIGS, write_tiny_model

FAMILIES = tuple(CONFIGS)
THREE = ("qwen3_moe", "deepseek_v2", "glm4_moe_lite")


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Tiny random models of different depths; widths of 48 and 80 make uneven slices for three ranks."""
    root = tmp_path_factory.mktemp("models")
    for number, family in enumerate(FAMILIES):
        write_tiny_model(root / family, family, num_layers=2 + number % 3, tokenizer=False)
    return {family: read_model_dir(root / family) for family in FAMILIES}


@pytest.fixture(scope="module")
def undivided(directories):
    """Results of every family's scripted steps in the undivided model, by (family, lane, number of slices)."""
    known = {}

    def results(family, lane, num_slices, steps):
        key = (family, lane, num_slices)
        if key not in known:
            model = MonolithicModel.load(directories[family], num_slices, page_tokens=PAGE_TOKENS)
            with threadpool_limits(1, "blas"):
                known[key] = [model.run(step) for step in steps]
        return known[key]

    return results


def make_config(layout, num_weights_ranks, **changes):
    fields = dict(
        layout=layout,
        weights_ranks=tuple(f"w{idx}" for idx in range(num_weights_ranks)),
        num_frames=NUM_FRAMES,
        frame_bytes=FRAME_BYTES,
        max_tokens_per_step=64,
    )
    return ClusterConfig(**(fields | changes))


def placement(directory, weights_ranks, route="ffn"):
    ffns = [layer.ffn for layer in directory.spec.layers]
    return ModelPlacement(
        name=directory.spec.family,
        directory=directory.path,
        hidden_size=directory.spec.hidden_size,
        kv_rank="kv0",
        weights_ranks=weights_ranks,
        page_tokens=PAGE_TOKENS,
        frame_bytes=FRAME_BYTES,
        route=route,
        choices_width=max(getattr(ffn, "choices_width", 0) for ffn in ffns) if route == "kv" else 0,
    )


def scripts(directories, families):
    """Steps of one lane for each family, in frames of their own."""
    frames = itertools.count(1)
    return [
        scripted_steps(directories[family].spec, family, lane, frames, first_id=10 * lane + 1)
        for lane, family in enumerate(families)
    ]


def play(cluster, lanes, move=lambda: None):
    """Submit each lane's steps one after the other, all lanes at once; gives the results by lane."""
    left = [list(steps) for steps in lanes]
    results = [[] for _ in lanes]
    for steps in left:
        cluster.submit(steps.pop(0))
    while any(len(got) < len(steps) for got, steps in zip(results, lanes, strict=True)):
        move()
        for event in cluster.poll(0.0 if move.__name__ == "turn" else 1.0):
            assert isinstance(event, StepDone), event
            lane = event.result.lane
            results[lane].append(event.result.sampled)
            if left[lane]:
                cluster.submit(left[lane].pop(0))
    return results


def check(undivided, families, num_slices, lanes, results):
    for lane, family in enumerate(families):
        whole = undivided(family, lane, num_slices, lanes[lane])
        assert results[lane] == whole, f"{family} over {num_slices} weights ranks differs from the undivided model"


@pytest.mark.parametrize("num_weights_ranks", [1, 2, 3])
@pytest.mark.parametrize("families", [FAMILIES[:4], FAMILIES[4:8], FAMILIES[8:]], ids=",".join)
def test_every_family_in_many_interleavings(directories, undivided, families, num_weights_ranks):
    ranks = tuple(f"w{idx}" for idx in range(num_weights_ranks))
    for seed in range(4):
        stepped = SteppedCluster(make_config("inprocess", num_weights_ranks, backend="numpy"), seed)
        for family in families:
            stepped.cluster.add_model(placement(directories[family], ranks))
        num_ready = 0
        while num_ready < len(families):
            stepped.turn()
            num_ready += sum(isinstance(event, ModelReady) for event in stepped.cluster.poll(0))
        lanes = scripts(directories, families)
        check(undivided, families, num_weights_ranks, lanes, play(stepped.cluster, lanes, stepped.turn))
        stepped.cluster.close()


@pytest.mark.parametrize("num_lanes", [1, 2, 4])
@pytest.mark.parametrize(
    ("layout", "num_weights_ranks", "hosts"),
    [
        ("inprocess", 2, ()),
        ("inprocess", 3, (("kv0", "w0", "w1", "w2"),)),
        ("processes", 1, ()),
        ("processes", 3, (("w0", "w1", "w2"),)),
        ("processes", 3, ()),
    ],
    ids=["threads", "one thread", "2 processes", "2 processes, 4 ranks", "4 processes"],
)
def test_threads_and_processes(directories, undivided, layout, num_weights_ranks, hosts, num_lanes):
    families = (*THREE, "gpt_oss")[:num_lanes]
    config = make_config(layout, num_weights_ranks, hosts=hosts)
    with running(config) as cluster:
        for family in families:
            cluster.add_model(placement(directories[family], config.weights_ranks))
        wait_for(cluster, ModelReady, len(families))
        lanes = scripts(directories, families)
        check(undivided, families, num_weights_ranks, lanes, play(cluster, lanes))


def test_experts_may_be_chosen_on_the_kv_rank(directories, undivided):
    families = (*THREE, "qwen2_moe")  # a gated shared expert is weighed there too
    config = make_config("processes", 2)
    with running(config) as cluster:
        for family in families:
            cluster.add_model(placement(directories[family], config.weights_ranks, route="kv"))
        wait_for(cluster, ModelReady, len(families))
        lanes = scripts(directories, families)
        check(undivided, families, 2, lanes, play(cluster, lanes))


def test_each_pool_holds_its_own_bytes_only(directories):
    config = make_config("processes", 2)
    with running(config) as cluster:
        cluster.add_model(placement(directories["qwen3_moe"], config.weights_ranks))
        wait_for(cluster, ModelReady)
        memory = cluster.memory_bytes()
        assert memory["kv0"]["ffn_weights"] == 0
        assert memory["kv0"]["attention_weights"] > 0
        for rank in config.weights_ranks:
            assert memory[rank]["kv_cache"] == 0
            assert memory[rank]["ffn_weights"] > 0


def test_ranks_in_another_order_give_another_sum(directories, undivided):
    """The control: were the order of partial sums not fixed, the comparison above would notice."""
    stepped = SteppedCluster(make_config("inprocess", 3, backend="numpy"), 0)
    stepped.cluster.add_model(placement(directories["mixtral"], ("w2", "w0", "w1")))
    lanes = scripts(directories, ("mixtral",))
    while not any(isinstance(event, ModelReady) for event in stepped.cluster.poll(0)):
        stepped.turn()
    placements = stepped.by_rank["kv0"]._loops["kv0"]._models._placements
    placements["mixtral"] = replace(placements["mixtral"], weights_ranks=("w0", "w1", "w2"))
    results = play(stepped.cluster, lanes, stepped.turn)
    assert results[0] != undivided("mixtral", 0, 3, lanes[0])
    stepped.cluster.close()
