"""Several KV ranks in one cluster: links, who ends a step, real models in seeded interleavings, a share that dies."""

import itertools
from dataclasses import replace

import pytest
from threadpoolctl import threadpool_limits

from crosspool.backends.base import Wait
from crosspool.cluster import messages
from crosspool.cluster.base import ModelReady, RankLost, RankReady, StepDone, StepFailed
from crosspool.cluster.channel import link_bytes
from crosspool.cluster.channel_book import ChannelBook, Link
from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.make_worker import make_worker
from crosspool.cluster.rank_loop import RankLoop
from crosspool.cluster.region import ArrayRegion
from crosspool.cluster.worker import RankWorker
from crosspool.models.directory import read_model_dir
from crosspool.scheduler.step import StepDescriptor, StepHeader
from tests.support.lane_driver import wait_for
from tests.support.lone_rank import alone
from tests.support.monolithic import MonolithicModel
from tests.support.real_cluster import running
from tests.support.scripted_steps import FRAME_BYTES, NUM_FRAMES, PAGE_TOKENS, scripted_steps
from tests.support.split_kv import SplitPaging, geometry_of, repaged, split_placement
from tests.support.stepped_cluster import SteppedCluster
from tests.support.tiny_models import write_tiny_model

TOLERANCE = 1e-5  # of log-probabilities, which are of the order of 1 to 10
PLACED = (
    ("qwen3_moe", "heads", 0),
    ("deepseek_v2", "tokens", 1),
    ("glm4_moe_lite", "one", 1),
    ("gpt_oss", "tokens", 0),
)
"""Family, split and home of each lane's model."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for number, (family, _, _) in enumerate(PLACED):
        write_tiny_model(root / family, family, num_layers=2 + number % 3, tokenizer=False)
    return {family: read_model_dir(root / family) for family, _, _ in PLACED}


@pytest.fixture(scope="module")
def undivided(directories):
    known = {}
    with threadpool_limits(1, "blas"):
        for lane, (family, _, _) in enumerate(PLACED):
            model = MonolithicModel.load(directories[family], 2, page_tokens=PAGE_TOKENS)
            known[family] = [model.run(step) for step in steps_of(directories, lane, family)]
    return known


def steps_of(directories, lane, family):
    return scripted_steps(directories[family].spec, family, lane, itertools.count(1), first_id=10 * lane + 1)


def make_config(layout, num_kv, **changes):
    fields = dict(
        layout=layout,
        kv_ranks=tuple(f"kv{idx}" for idx in range(num_kv)),
        weights_ranks=("w0", "w1"),
        num_frames=NUM_FRAMES,
        frame_bytes=FRAME_BYTES,
        max_tokens_per_step=64,
        num_lanes=4,
    )
    return ClusterConfig(**(fields | changes))


def placed(directories, num_kv):
    """Every lane's placement and steps, with pages on the ranks that the split says."""
    taken = itertools.count(1, 12)
    for lane, (family, split, home) in enumerate(PLACED):
        if split == "heads" and num_kv > 2:  # than the tiny models have KV heads
            split = "tokens"
        sizes = {"page_tokens": PAGE_TOKENS, "frame_bytes": FRAME_BYTES}
        found = split_placement(directories[family], split, num_kv, ("w0", "w1"), home, **sizes)
        width = geometry_of(found, directories[family]).frames_per_page
        paging = Paging(found, width, next(taken))
        yield found, list(repaged(steps_of(directories, lane, family), paging, found.kv_rank))


class Paging(SplitPaging):
    """Frames from `first` on, on every rank; pages of `one` lie on the home."""

    def __init__(self, placement, width, first):
        self._numbers = [int(rank.removeprefix("kv")) for rank in placement.kv_ranks]
        self._split, self._width = placement.kv_split, width
        self._free = {
            n: list(range(n * NUM_FRAMES + first + 11, n * NUM_FRAMES + first - 1, -1)) for n in self._numbers
        }
        self._choose = (lambda idx: 0) if placement.kv_split == "one" else (lambda idx: idx)
        self.num_pages = dict.fromkeys(self._numbers, 0)


def play(cluster, lanes, move=None):
    """Submit each lane's steps one after the other, all lanes at once; gives the results by lane."""
    left = [list(steps) for steps in lanes]
    results = [[] for _ in lanes]
    for steps in left:
        cluster.submit(steps.pop(0))
    while any(len(got) < len(steps) for got, steps in zip(results, lanes, strict=True)):
        if move is not None:
            move()
        for event in cluster.poll(0.0 if move is not None else 1.0):
            assert isinstance(event, StepDone), event
            results[event.result.lane].append(event.result.sampled)
            if left[event.result.lane]:
                cluster.submit(left[event.result.lane].pop(0))
    return results


def check(undivided, results):
    """The same tokens; log-probabilities as near as merging partial results allows, and for `one` the very same."""
    for (family, split, _), got in zip(PLACED, results, strict=True):
        if split == "one":
            assert got == undivided[family]
        for sampled, expected in zip(got, undivided[family], strict=True):
            assert [token.token_id for token in sampled] == [token.token_id for token in expected]
            for one, other in zip(sampled, expected, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=10 * TOLERANCE)


@pytest.mark.parametrize("num_kv", [2, 3])
def test_models_of_every_split_in_many_interleavings(directories, undivided, num_kv):
    for seed in range(6):
        stepped = SteppedCluster(make_config("processes", num_kv), seed)
        lanes = start_lanes(stepped, directories, num_kv)
        check(undivided, play(stepped.cluster, lanes, stepped.turn))
        stepped.cluster.close()


def start_lanes(stepped, directories, num_kv):
    lanes = []
    for placement, steps in placed(directories, num_kv):
        stepped.cluster.add_model(placement)
        lanes.append(steps)
    num_ready = 0
    while num_ready < len(lanes):
        stepped.turn()
        num_ready += sum(isinstance(event, ModelReady) for event in stepped.cluster.poll(0))
    return lanes


@pytest.mark.parametrize(
    ("layout", "hosts"),
    [
        ("inprocess", (("kv0",), ("kv1",), ("w0",), ("w1",))),
        ("inprocess", ()),
        ("processes", (("kv0", "w0"), ("kv1", "w1"))),
    ],
    ids=["threads", "one thread", "processes"],
)
def test_threads_and_processes(directories, undivided, layout, hosts):
    with running(make_config(layout, 2, hosts=hosts)) as cluster:
        lanes = []
        for placement, steps in placed(directories, 2):
            cluster.add_model(placement)
            lanes.append(steps)
        wait_for(cluster, ModelReady, len(lanes))
        check(undivided, play(cluster, lanes))


def test_a_share_that_dies_fails_the_steps_that_need_it_and_no_others(directories):
    for seed in range(8):
        stepped = SteppedCluster(make_config("processes", 2), seed)
        lanes = start_lanes(stepped, directories, 2)
        for steps in lanes:
            stepped.cluster.submit(steps[0])
        for _ in range(seed):
            stepped.turn()
        stepped.by_rank["kv1"].die()
        ended, events = {}, []
        while len(ended) < len(lanes) or not any(isinstance(event, RankReady) for event in events):
            stepped.turn()
            events = stepped.cluster.poll(0)
            for event in events:
                if isinstance(event, StepDone):
                    ended[event.result.lane] = event
                if isinstance(event, StepFailed):
                    ended[event.lane] = event
        failed = {lane for lane, event in ended.items() if isinstance(event, StepFailed)}
        assert all("kv1" in ended[lane].error for lane in failed)
        assert not any(ended[lane].fatal for lane in failed)
        # The rank is back without sequences: the same first steps run again, under new numbers.
        for lane, steps in enumerate(lanes):
            stepped.cluster.submit(steps[0].replayed(100 + lane))
        done = set()
        while len(done) < len(lanes):
            stepped.turn()
            done |= {event.result.lane for event in stepped.cluster.poll(0) if isinstance(event, StepDone)}
        stepped.cluster.close()


def test_the_home_names_a_share_that_does_not_answer(directories):
    stepped = SteppedCluster(make_config("processes", 2, step_deadline_s=1.0), 1)
    lanes = start_lanes(stepped, directories, 2)
    stepped.by_rank["kv1"].is_frozen = True
    stepped.cluster.submit(lanes[0][0])
    events = []
    while not any(isinstance(event, RankLost) for event in events):
        stepped.turn()
        events += stepped.cluster.poll(0)
    [lost] = [event for event in events if isinstance(event, RankLost)]
    assert lost.rank == "kv1"
    stepped.cluster.close()


class TestLinks:
    def test_kv_ranks_of_a_split_model_have_one_link_a_lane_whoever_is_home(self, directories):
        book = ChannelBook(num_lanes=1, max_tokens_per_step=2)
        one = split_placement(directories["deepseek_v2"], "tokens", 2, ("w0",), 0)
        other = split_placement(directories["gpt_oss"], "tokens", 2, ("w0",), 1)
        width = max(one.exchange_width, other.exchange_width)
        links = book.missing([one, other], lambda rank: True)
        assert Link(0, "kv0", "kv1", 2 * width) in links
        assert {(link.rank, link.peer) for link in links} == {("kv0", "kv1"), ("kv0", "w0"), ("kv1", "w0")}
        for link in links:
            book.opened(link)
        assert book.missing([one, other], lambda rank: True) == []
        assert book.unused([other]) == [("kv0", "w0")]

    def test_under_one_every_kv_rank_has_links_to_the_weights_ranks_and_none_to_another(self, directories):
        book = ChannelBook(num_lanes=1, max_tokens_per_step=2)
        placement = split_placement(directories["deepseek_v2"], "one", 2, ("w0",), 0)
        links = book.missing([placement], lambda rank: True)
        assert {(link.rank, link.peer) for link in links} == {("kv0", "w0"), ("kv1", "w0")}


def test_a_step_of_a_model_must_be_led_by_one_of_its_homes(directories):
    stepped = SteppedCluster(make_config("processes", 2), 0)
    lanes = start_lanes(stepped, directories, 2)
    step = lanes[0][0]
    with pytest.raises(ValueError, match="step names KV rank kv1, but qwen3_moe lives on kv0"):
        stepped.cluster.submit(replace(step, header=step.header._replace(kv_rank="kv1")))
    with pytest.raises(ValueError, match="name each rank once"):
        stepped.cluster.add_model(
            replace(split_placement(directories["gpt_oss"], "one", 2, ("w0",), 0), name="x", kv_peers=("kv0",))
        )
    stepped.cluster.close()


def test_a_backend_that_cannot_hold_shares_says_so():
    said = []
    worker = make_worker(make_config("inprocess", 2), "kv1")
    loop = RankLoop("kv1", RankWorker(attention_worker=worker.attention), alone(said.append))
    loop.handle(messages.OpenChannels(0, "kv0", 64, ArrayRegion(link_bytes(64)), is_far=True))
    header = StepHeader(lane=0, model="m", step_seq=1, phase="decode", num_tokens=1, kv_rank="kv0")
    loop.handle(messages.Step(StepDescriptor(header=header, rows=())))
    [ended] = said
    assert ended.fatal
    assert "this backend does not split a model over KV ranks; use one KV rank" in ended.error


class SharesInTurn:
    """A share worker that has a part in steps of decode only, and notes which steps it began."""

    def __init__(self):
        self.began = []

    def run_share(self, step, links):
        self.began.append(step.header.step_seq)
        return self._answers(links) if step.header.phase == "decode" else None

    def _answers(self, links):
        yield Wait(tuple(links.exchange_inlets.values()), 1)

    def memory_bytes(self):
        return {}


def test_steps_that_a_share_has_no_part_in_are_over_for_it_at_once():
    """The home does not wait for it there, so several may come before its loop turns."""
    said, worker = [], SharesInTurn()
    loop = RankLoop("kv1", RankWorker(attention_worker=worker, share_worker=worker), alone(said.append))
    loop.handle(messages.OpenChannels(0, "kv0", 64, ArrayRegion(link_bytes(64)), is_far=True))
    for seq, phase in ((1, "prefill"), (2, "prefill"), (3, "decode"), (4, "prefill")):
        header = StepHeader(lane=0, model="m", step_seq=seq, phase=phase, num_tokens=1, kv_rank="kv0")
        loop.handle(messages.Step(StepDescriptor(header=header, rows=()), behind=seq - 1))
    assert worker.began == [1, 2, 3]  # 4 waits behind 3, which waits for the home
    assert loop.is_busy
    assert not said


def test_a_share_does_not_begin_the_step_behind_one_that_it_gave_up():
    """It has not taken in the pages of the one before: the home refuses the step behind, and the share forgets it."""
    said, worker = [], SharesInTurn()
    loop = RankLoop("kv1", RankWorker(attention_worker=worker, share_worker=worker), alone(said.append))
    loop.handle(messages.OpenChannels(0, "kv0", 64, ArrayRegion(link_bytes(64)), is_far=True))
    for seq in (1, 2):
        header = StepHeader(lane=0, model="m", step_seq=seq, phase="decode", num_tokens=1, kv_rank="kv0")
        loop.handle(messages.Step(StepDescriptor(header=header, rows=()), behind=seq - 1))
    loop.handle(messages.AbortStep(0, 1))
    assert worker.began == [1]
    assert not loop.is_busy
    assert not said
