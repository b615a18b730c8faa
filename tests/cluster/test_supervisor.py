"""The pure parts of the parent: states of ranks, models, channels, steps. No rank runs here."""

from dataclasses import replace
from pathlib import Path

import pytest

from crosspool.cluster.base import ModelPlacement, StepFailed
from crosspool.cluster.channel_book import ChannelBook, Link
from crosspool.cluster.cluster_steps import InFlight
from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.roster import Roster
from crosspool.cluster.supervisor import LOOKS, MAX_BACKOFF_S, RankState, Supervisor, backoff_s
from crosspool.scheduler.step import StepHeader


def make_supervisor(hosts=(("kv0",), ("w0", "w1")), **changes):
    fields = dict(start_timeout_s=10.0, hang_s=6.0, max_failed_starts=3)
    return Supervisor(hosts, **(fields | changes))


def bring_up(supervisor, host, ranks, now_s):
    supervisor.launched(host, now_s)
    for rank in ranks:
        supervisor.said_hello(rank)
        supervisor.has_loaded(rank, now_s)


def placement(name="m", hidden_size=8, kv_rank="kv0", weights_ranks=("w0",), **changes):
    return ModelPlacement(
        name=name,
        directory=Path(name),
        hidden_size=hidden_size,
        kv_rank=kv_rank,
        weights_ranks=weights_ranks,
        page_tokens=16,
        frame_bytes=4096,
        **changes,
    )


def open_missing(book, models, is_up):
    """What is missing, which is open then."""
    links = book.missing(models, is_up)
    for link in links:
        book.opened(link)
    return links


def header(lane=0, step_seq=1, kv_rank="kv0"):
    return StepHeader(lane=lane, model="m", step_seq=step_seq, phase="decode", num_tokens=1, kv_rank=kv_rank)


class TestSupervisor:
    def test_all_hosts_are_due_at_first_and_none_once_launched(self):
        supervisor = make_supervisor()
        assert supervisor.due(0.0) == [0, 1]
        supervisor.launched(0, 0.0)
        assert supervisor.due(0.0) == [1]
        assert supervisor.state("kv0") is RankState.STARTING

    def test_a_rank_goes_from_starting_over_loading_to_ready_by_itself(self):
        supervisor = make_supervisor()
        supervisor.launched(1, 1.0)
        supervisor.said_hello("w1")
        assert (supervisor.state("w0"), supervisor.state("w1")) == (RankState.STARTING, RankState.LOADING)
        assert supervisor.has_loaded("w1", 3.5) == 2.5
        assert (supervisor.state("w0"), supervisor.state("w1")) == (RankState.STARTING, RankState.READY)

    def test_a_host_that_was_ready_restarts_at_once_and_counts_from_its_loss(self):
        supervisor = make_supervisor()
        bring_up(supervisor, 1, ("w0", "w1"), 0.0)
        assert supervisor.has_ended(1, 50.0)
        assert not supervisor.is_up("w1")
        assert 1 in supervisor.due(50.0)
        supervisor.launched(1, 50.0)
        supervisor.said_hello("w0")
        assert supervisor.has_loaded("w0", 52.0) == 2.0

    def test_starts_that_fail_in_a_row_wait_longer_and_then_end(self):
        supervisor = make_supervisor()
        now_s = 0.0
        outcomes, waits = [], []
        for _ in range(3):
            supervisor.launched(0, now_s)
            outcomes.append(supervisor.has_ended(0, now_s))
            while outcomes[-1] and 0 not in supervisor.due(now_s):
                now_s += 0.01
            waits.append(now_s)
        assert outcomes == [True, True, False]
        assert waits[1] - waits[0] > waits[0] > 0
        assert supervisor.state("kv0") is RankState.FAILED
        assert supervisor.due(1e9) == [1]

    def test_a_host_that_served_is_tried_for_ever_while_the_machine_has_nothing_to_start_it_with(self):
        supervisor = make_supervisor()
        bring_up(supervisor, 0, ("kv0",), 0.0)
        assert supervisor.has_ended(0, 1.0)
        for now_s in range(2, 20):
            supervisor.launched(0, now_s)
            assert supervisor.has_ended(0, now_s, was_launched=False)
        supervisor.launched(0, 20.0)
        assert not supervisor.has_ended(0, 20.0)  # it was started and died: that is its own fault again
        new = make_supervisor()
        assert [new.has_ended(0, 0.0, was_launched=False) for _ in range(3)] == [True, True, False]

    def test_a_success_in_between_starts_the_count_anew(self):
        supervisor = make_supervisor(max_failed_starts=2)
        for now_s in range(5):
            supervisor.launched(0, now_s)
            assert supervisor.has_ended(0, now_s)
            bring_up(supervisor, 0, ("kv0",), now_s)
            assert supervisor.has_ended(0, now_s)

    def test_the_wait_between_starts_is_bounded(self):
        assert backoff_s(0) == 0.0
        assert backoff_s(10_000) == MAX_BACKOFF_S

    def test_a_start_that_says_nothing_is_overdue(self):
        supervisor = make_supervisor()
        supervisor.launched(0, 0.0)
        assert supervisor.overdue(0, 9.9, 0, True) is None
        assert supervisor.overdue(0, 10.1, 0, True) == "did not start within 10 s"

    def look(self, supervisor, seconds, beats, owes=True, start_s=0.0):
        """Looks twice a second; gives the first verdict and its time."""
        for tick in range(int(seconds * 2)):
            now_s = start_s + tick / 2
            reason = supervisor.overdue(0, now_s, next(beats), owes)
            if reason is not None:
                return now_s, reason
        return None

    def test_a_host_that_owes_work_and_does_not_beat_hangs(self):
        supervisor = make_supervisor()
        bring_up(supervisor, 0, ("kv0",), 0.0)
        now_s, reason = self.look(supervisor, 20, iter(lambda: 7, None))
        assert now_s == 6.5
        assert reason == "gave no sign of life for 6.5 s"

    def test_a_slow_start_does_not_count_as_silence(self):
        supervisor = make_supervisor()
        supervisor.launched(0, 0.0)
        assert self.look(supervisor, 9, iter(lambda: 0, None)) is None
        supervisor.said_hello("kv0")
        assert self.look(supervisor, 6, iter(lambda: 0, None), start_s=9.0) is None

    def test_one_that_beats_or_owes_nothing_does_not(self):
        supervisor = make_supervisor()
        bring_up(supervisor, 0, ("kv0",), 0.0)
        assert self.look(supervisor, 40, iter(range(1000))) is None
        assert self.look(supervisor, 40, iter(lambda: 7, None), owes=False, start_s=40.0) is None

    def test_time_in_which_nobody_looked_does_not_count(self):
        supervisor = make_supervisor()
        bring_up(supervisor, 0, ("kv0",), 0.0)
        assert supervisor.overdue(0, 1.0, 7, True) is None
        assert supervisor.overdue(0, 1000.0, 7, True) is None
        assert supervisor.silent_s(0, 1001.0) == 1.0

    def test_an_idle_cluster_asks_for_no_look(self):
        supervisor = make_supervisor()
        bring_up(supervisor, 0, ("kv0",), 0.0)
        bring_up(supervisor, 1, ("w0", "w1"), 0.0)
        assert supervisor.next_look_s(5.0, owing=[]) is None
        assert supervisor.next_look_s(5.0, owing=[1]) == 5.0 + 6.0 / LOOKS
        supervisor.has_ended(1, 5.0)
        assert supervisor.next_look_s(5.0, owing=[]) == 5.0


class TestRoster:
    def test_a_model_is_ready_once_with_the_last_rank(self):
        roster = Roster()
        roster.add(placement(weights_ranks=("w0", "w1")), 10.0)
        loads = {rank: roster.load("m", rank).load_id for rank in ("kv0", "w0", "w1")}
        assert len(set(loads.values())) == 3
        assert roster.has_loaded("m", "w1", 5, 11.0) is None
        assert roster.has_loaded("m", "kv0", 6, 12.0) is None
        assert not roster.is_announced("m")
        ready = roster.has_loaded("m", "w0", 7, 13.0)
        assert (ready.seconds, ready.bytes_by_rank) == (3.0, {"w1": 5, "kv0": 6, "w0": 7})
        roster.rank_lost("w0")
        assert roster.is_loading("w0")
        roster.load("m", "w0")
        assert roster.has_loaded("m", "w0", 7, 20.0) is None

    def test_reports_of_an_older_load_are_told_apart(self):
        roster = Roster()
        roster.add(placement(), 0.0)
        old = roster.load("m", "w0").load_id
        roster.remove("m")
        roster.add(placement(), 1.0)
        new = roster.load("m", "w0").load_id
        assert not roster.is_current("m", "w0", old)
        assert roster.is_current("m", "w0", new)

    def test_a_new_model_is_blamed_for_the_second_loss_while_it_loads(self):
        roster = Roster()
        roster.add(placement("old"), 0.0)
        for rank in ("kv0", "w0"):
            roster.load("old", rank)
            roster.has_loaded("old", rank, 1, 0.0)
        roster.add(placement("new"), 0.0)
        roster.load("new", "w0")
        assert roster.rank_lost("w0") == []
        roster.load("new", "w0")
        roster.load("old", "w0")
        assert roster.rank_lost("w0") == ["new"]

    def test_an_unknown_name_is_refused_with_those_there_are(self):
        roster = Roster()
        roster.add(placement("a"), 0.0)
        for call in (roster.remove, roster.placement, roster.ranks):
            with pytest.raises(ValueError, match="no model 'b' is placed; there are: a"):
                call("b")


class TestChannelBook:
    def test_links_follow_models_lanes_and_ranks_that_are_up(self):
        book = ChannelBook(num_lanes=2, max_tokens_per_step=10)
        models = [placement(weights_ranks=("w0", "w1"))]
        assert open_missing(book, models, lambda rank: rank != "w1") == [
            Link(0, "kv0", "w0", 80),
            Link(1, "kv0", "w0", 80),
        ]
        assert open_missing(book, models, lambda rank: True) == [Link(0, "kv0", "w1", 80), Link(1, "kv0", "w1", 80)]
        assert open_missing(book, models, lambda rank: True) == []
        models.append(placement("wide", hidden_size=20))
        assert open_missing(book, models, lambda rank: True) == [Link(0, "kv0", "w0", 200), Link(1, "kv0", "w0", 200)]
        assert not book.needs_lane(1)
        assert book.needs_lane(2)
        assert open_missing(book, models, lambda rank: True) == [Link(2, "kv0", "w0", 200), Link(2, "kv0", "w1", 80)]

    def test_a_link_with_a_prefill_rank_holds_a_whole_contexts_kv_of_a_layer(self):
        book = ChannelBook(num_lanes=1, max_tokens_per_step=10)
        narrow = placement("a", prefill_ranks=("p0",), kv_row_width=6, context_tokens=100)
        assert open_missing(book, [narrow], lambda rank: rank != "w0") == [Link(0, "kv0", "p0", 600)]
        wide = placement("b", prefill_ranks=("p0",), kv_row_width=200, context_tokens=5)
        assert open_missing(book, [narrow, wide], lambda rank: rank != "w0") == [Link(0, "kv0", "p0", 2000)]

    def test_links_with_a_prefill_rank_are_those_of_its_own_lane(self):
        config = ClusterConfig(
            num_frames=2,
            frame_bytes=4096,
            max_tokens_per_step=10,
            num_lanes=4,
            prefill_ranks=("p0", "p1"),
            prefill_lanes=((2, "p0"), (3, "p1")),
        )
        book = ChannelBook(config.num_lanes, 10, may_use=config.may_use)
        model = placement("a", prefill_ranks=("p0", "p1"), kv_row_width=6, context_tokens=100)
        links = {(link.lane, link.peer) for link in open_missing(book, [model], lambda rank: True)}
        assert links == {(0, "w0"), (1, "w0"), (2, "w0"), (3, "w0"), (2, "p0"), (3, "p1")}
        book.rank_lost("p1")
        assert [(link.lane, link.peer) for link in open_missing(book, [model], lambda rank: True)] == [(3, "p1")]
        with pytest.raises(
            ValueError, match=r"^prefill_lanes gives lane 4 rank 'p0'; lanes are 0 to 3, prefill ranks p0, p1"
        ):
            replace(config, prefill_lanes=((4, "p0"),))

    def test_a_lost_rank_needs_its_links_anew_and_an_unused_pair_is_closed(self):
        parts = ChannelBook(num_lanes=1, max_tokens_per_step=10, hands_in_parts=True)
        links = open_missing(
            parts, [placement("c", prefill_ranks=("p0",), kv_row_width=20, context_tokens=100)], lambda _: True
        )
        assert {link.capacity for link in links if link.peer == "p0"} == {200}, "a chunk's own KV"
        book = ChannelBook(num_lanes=1, max_tokens_per_step=1)
        models = [placement("a"), placement("b", weights_ranks=("w1",))]
        assert len(open_missing(book, models, lambda rank: True)) == 2
        book.rank_lost("w1")
        assert open_missing(book, models, lambda rank: True) == [Link(0, "kv0", "w1", 8)]
        assert book.unused(models[:1]) == [("kv0", "w1")]
        assert book.unused(models[:1]) == []


class TestInFlight:
    def failure(self, step_seq=1):
        return StepFailed(lane=0, step_seq=step_seq, waiting_on=("w0",), error="lost")

    def test_a_step_ends_once_and_by_its_own_number(self):
        flights = InFlight()
        flights.begin(header(step_seq=4), ("kv0", "w0"))
        assert flights.end(0, 3) is None
        assert flights.end(0, 4) == (("kv0", "w0"), None)
        assert flights.end(0, 4) is None

    def test_the_first_failure_noted_is_kept(self):
        flights = InFlight()
        flights.begin(header(), ("kv0", "w0"))
        first = self.failure()
        assert flights.doom(0, 1, first) == ("kv0", "w0")
        assert flights.doom(0, 1, StepFailed(lane=0, step_seq=1, waiting_on=(), error="other")) == ()
        assert flights.end(0, 1) == (("kv0", "w0"), first)
        assert flights.doom(0, 1, first) == ()

    def test_a_lane_carries_one_step_and_one_behind_it(self):
        flights = InFlight()
        assert not flights
        assert flights.begin(header(), ("kv0", "w0")) == 0
        with pytest.raises(ValueError, match="lane 0 of kv0 still runs step 1; submit step 2 of kv9 after"):
            flights.begin(header(step_seq=2)._replace(kv_rank="kv9"), ("kv9", "w0"))
        assert flights.begin(header(step_seq=2), ("kv0", "w0")) == 1
        with pytest.raises(ValueError, match="lane 0 of kv0 still runs step 1 and 2; submit step 3 of kv0 after"):
            flights.begin(header(step_seq=3), ("kv0", "w0"))
        assert [flight.step_seq for flight in flights.on_rank("w0")] == [1, 2]
        flights.end(0, 1)
        assert flights.begin(header(step_seq=3), ("kv0", "w0")) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(layout="threads"), "layout is 'threads'"),
        (dict(weights_ranks=()), "at least one KV rank and one weights rank"),
        (dict(weights_ranks=("kv0",)), "must differ"),
        (dict(hosts=(("w9",),)), "hosts names rank 'w9'"),
        (dict(hosts=(("w0", "w0"),)), "rank w0 appears 2 times"),
        (dict(hosts=((),)), "empty group"),
        (dict(order="lottery"), "one of none, ticket, priority"),
        (dict(num_frames=0), "num_frames is 0"),
        (dict(max_failed_starts=0), "max_failed_starts is 0"),
        (dict(step_deadline_s=0.0), "step_deadline_s 0.0"),
    ],
)
def test_a_wrong_config_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        ClusterConfig(**(dict(num_frames=1, frame_bytes=4096, max_tokens_per_step=8) | change))


def test_ranks_that_are_not_grouped_get_a_host_each():
    config = ClusterConfig(
        weights_ranks=("w0", "w1", "w2"),
        hosts=(("w2", "kv0"),),
        num_frames=1,
        frame_bytes=4096,
        max_tokens_per_step=8,
    )
    assert config.all_hosts == (("w2", "kv0"), ("w0",), ("w1",))
