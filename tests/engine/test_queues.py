"""Which queued sequence is admitted next: fair shares, passing and ageing, priority, deadlines, Retry-After."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosspool.core import FinishReason, Request, SamplingParams
from crosspool.engine.queues import MAX_PRIORITY_S, MAX_RETRY_AFTER_S, AdmissionOrder, ModelQueue
from crosspool.engine.sequence import Sequence
from crosspool.errors import QueueFullError
from crosspool.kv_pool.block_table import BlockTable
from tests.support.core_drive import Drive, a_config, a_model


def a_sequence(sequence_id: int, model: str = "p", arrival_s: float = 0.0, priority: int = 0, **more) -> Sequence:
    request = Request(
        request_id=str(sequence_id),
        model=model,
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=1),
        arrival_s=arrival_s,
        priority=priority,
        **more,
    )
    return Sequence(sequence_id=sequence_id, request=request, table=BlockTable(4))


def a_queue(model: str, *ids: int) -> ModelQueue:
    queue = ModelQueue(model, 100)
    for sequence_id in ids:
        queue.push(a_sequence(sequence_id, model, arrival_s=float(sequence_id)))
    return queue


ORDER = AdmissionOrder(ageing_s=2.0, bypass_window=2)


def pick(queues, now=0.0, held=None, fits=lambda sequence: True):
    sequence = ORDER.pick(queues, now, lambda model: (held or {}).get(model, 0), fits)
    return None if sequence is None else sequence.sequence_id


def test_the_model_with_the_fewest_frames_comes_first():
    queues = [a_queue("p", 1, 2), a_queue("q", 3)]
    assert pick(queues, held={"p": 5, "q": 1}) == 3
    assert pick(queues, held={"p": 1, "q": 5}) == 1
    assert pick([a_queue("p")]) is None


def test_small_ones_pass_a_big_one_until_it_has_aged():
    queues = [a_queue("p", 1, 2, 3, 4), a_queue("q", 5)]
    held = {"q": 1}

    def small(sequence):
        return sequence.sequence_id != 1

    assert pick(queues, now=10.0, held=held, fits=small) == 2
    assert pick(queues, now=11.9, held=held, fits=small) == 2
    assert pick(queues, now=12.0, held=held, fits=small) is None  # nobody of any model passes it now
    assert pick(queues, now=12.0, held=held) == 1


def test_one_that_only_its_ceiling_keeps_out_holds_back_its_own_model_alone():
    queues = [a_queue("p", 1, 2), a_queue("q", 3)]

    def choose(now):
        return ORDER.pick(
            queues, now, lambda model: 0, lambda s: s.sequence_id != 1, is_capped=lambda s: s.request.model == "p"
        )

    assert choose(0.0).sequence_id == 2
    assert choose(2.0).sequence_id == 3


def test_what_fits_its_own_floor_passes_one_that_has_aged():
    queues = [a_queue("p", 1), a_queue("q", 2), a_queue("r", 3)]

    def choose(now):
        return ORDER.pick(
            queues, now, lambda model: 0, lambda s: s.sequence_id > 1, is_floored=lambda s: s.request.model == "r"
        )

    assert choose(0.0).sequence_id == 2
    assert choose(2.0).sequence_id == 3


def test_only_a_few_behind_it_may_pass():
    assert pick([a_queue("p", 1, 2, 3, 4)], fits=lambda sequence: sequence.sequence_id == 4) is None
    assert pick([a_queue("p", 1, 2, 3)], fits=lambda sequence: sequence.sequence_id == 3) == 3


def test_priority_is_worth_arrival_time_and_no_more():
    queue = ModelQueue("p", 10)
    for sequence_id, arrival_s, priority in ((1, 0.0, 0), (2, 0.5, -1), (3, 1.5, -1), (4, 3.0, -1), (5, 0.1, 1)):
        queue.push(a_sequence(sequence_id, arrival_s=arrival_s, priority=priority))
    assert [sequence.sequence_id for sequence in queue] == [2, 1, 3, 5, 4]


def test_what_has_started_before_comes_back_to_the_head_and_keeps_no_deadline():
    queue = a_queue("p", 5, 6)
    back = a_sequence(9, arrival_s=9.0, deadline_s=10.0)
    back.scheduled_s = 9.5
    queue.push(back)
    assert [sequence.sequence_id for sequence in queue] == [9, 5, 6]
    assert queue.expired(now=100.0) == []
    assert queue.next_deadline() is None


def test_deadlines():
    queue = ModelQueue("p", 10)
    for sequence_id, deadline_s in ((1, 5.0), (2, None), (3, 4.0)):
        queue.push(a_sequence(sequence_id, deadline_s=deadline_s))
    assert queue.next_deadline() == 4.0
    assert [sequence.sequence_id for sequence in queue.expired(4.5)] == [3]


def test_retry_after_is_the_pace_of_admissions():
    queue = a_queue("p", *range(30))
    assert queue.retry_after_s() == 1.0
    for index in range(4):
        queue.take(queue.first(1)[0], now=7.0 * index)
    assert queue.retry_after_s() == 7.0
    queue.max_queue = 3
    assert "try again in 7 s" in str(queue.overflow(2, ""))
    queue.take(queue.first(1)[0], now=1e6)
    assert queue.retry_after_s() == MAX_RETRY_AFTER_S


def test_no_priority_is_worth_more_than_its_bound():
    queue = ModelQueue("p", 100)
    queue.push(a_sequence(1, arrival_s=0.0))
    queue.push(a_sequence(2, arrival_s=MAX_PRIORITY_S + 1, priority=-(10**9)))
    queue.push(a_sequence(3, arrival_s=MAX_PRIORITY_S - 1, priority=-(10**9)))
    queue.push(a_sequence(4, arrival_s=0.0, priority=10**9))
    queue.push(a_sequence(5, arrival_s=MAX_PRIORITY_S + 2))
    assert [sequence.sequence_id for sequence in queue] == [3, 1, 2, 4, 5]


def test_keys_take_turns_and_a_priority_only_counts_among_its_own():
    queue = ModelQueue("p", 100)
    for sequence_id in range(1, 7):
        queue.push(a_sequence(sequence_id, arrival_s=float(sequence_id), key="flood", priority=-50))
    queue.push(a_sequence(7, arrival_s=7.0, key="late"))
    queue.push(a_sequence(8, arrival_s=8.0, key="later"))
    queue.push(a_sequence(9, arrival_s=9.0, key="late"))
    assert [sequence.sequence_id for sequence in queue] == [1, 7, 8, 2, 9, 3, 4, 5, 6]
    order = []
    while len(queue):
        order.append(queue.first(1)[0].sequence_id)
        queue.take(queue.first(1)[0], 0.0)
    assert order == [1, 7, 8, 2, 9, 3, 4, 5, 6]
    queue.push(a_sequence(10, key="flood"))
    queue.push(a_sequence(11, key="later"))
    assert [sequence.sequence_id for sequence in queue] == [11, 10]  # flood was served last


@given(st.lists(st.sampled_from(["push a", "push b", "push c", "take", "remove"]), max_size=80))
def test_while_a_key_waits_each_other_key_has_one_turn_at_most(operations):
    queue, passed = ModelQueue("p", 1000), {"a": [], "b": [], "c": []}
    for number, operation in enumerate(operations):
        if operation.startswith("push"):
            queue.push(a_sequence(number, arrival_s=float(number), key=operation[-1]))
        elif len(queue):
            sequence = queue.first(1)[0]
            key = sequence.request.key
            if operation == "take":
                queue.take(sequence, float(number))
                passed[key] = []
                for other in passed.keys() - {key}:
                    passed[other].append(key)
            else:
                queue.remove(sequence)
        waiting = {sequence.request.key for sequence in queue}
        for key, others in passed.items():
            if key not in waiting:
                others.clear()
            assert len(others) == len(set(others)), (key, others)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.integers(0, 9)), min_size=1, max_size=40),
)
def test_nothing_leaves_the_queue_but_what_is_taken(operations):
    """Fresh sequences and those that lost their KV, of the same keys, come and go in any order."""
    queue, inside = ModelQueue("p", 100), []
    for sequence_id, (key, has_started, which) in enumerate(operations):
        sequence = a_sequence(sequence_id, arrival_s=float(sequence_id), key=key)
        sequence.scheduled_s = 0.5 if has_started else None
        queue.push(sequence)
        inside.append(sequence)
        if which < len(inside):
            queue.take(inside.pop(which), now=float(sequence_id))
        assert len(queue) == len(inside)
        assert {queued.sequence_id for queued in queue} == {kept.sequence_id for kept in inside}


def test_a_key_may_be_bounded_on_its_own_and_then_leaves_place_for_others():
    drive = Drive(a_config(40, max_queue=10, max_queue_per_key=3, max_num_seqs=1), [a_model("p")])
    for _ in range(4):  # one runs
        drive.add("p", 4, 4, key="flood")
    with pytest.raises(QueueFullError, match="this API key may have 3 requests in the queue of p and 1 more came"):
        drive.add("p", 4, 4, key="flood")
    drive.add("p", 4, 4, key="other")
    drive.run()
    drive.check_all_ended()


def test_a_flooding_key_holds_up_another_by_one_request_at_most():
    drive = Drive(a_config(40, max_queue=1000, max_num_seqs=1), [a_model("p")])
    flood = [drive.add("p", 4, 4, key="flood")[0] for _ in range(50)]
    [late] = drive.add("p", 4, 4, key="late")
    drive.run()
    before = [sequence for sequence in flood if drive.first_token_s[sequence] < drive.first_token_s[late]]
    assert len(before) == 1  # the one that ran already
    drive.check_all_ended()


def test_a_big_request_of_one_key_ages_though_other_keys_have_turns():
    queue = ModelQueue("p", 100)
    queue.push(a_sequence(1, key="big"))
    for sequence_id in range(2, 8):
        queue.push(a_sequence(sequence_id, arrival_s=1.0, key=f"small {sequence_id % 2}"))

    def small(sequence):
        return sequence.sequence_id != 1

    taken = []
    for now in (0.0, 0.5, 1.0, 1.9):
        sequence = ORDER.pick([queue], now, lambda model: 0, small)
        taken.append(sequence.sequence_id)
        queue.take(sequence, now)
    assert taken == [2, 3, 4, 5]
    assert ORDER.pick([queue], 2.0, lambda model: 0, small) is None
    assert ORDER.pick([queue], 2.1, lambda model: 0, lambda sequence: True).sequence_id == 1


@pytest.mark.parametrize("admission", ["reserve", "forecast"])
def test_neither_a_big_request_nor_small_ones_behind_it_starve(admission):
    drive = Drive(a_config(20, admission=admission, ageing_s=0.2, max_num_seqs=16, max_queue=10_000), [a_model("p")])
    drive.cluster.durations["p"] = 0.01
    first_small = [drive.add("p", 4, 8)[0] for _ in range(3)]
    drive.turn()
    [big] = drive.add("p", 60, 16)  # 19 of 20 frames
    small = []
    while drive.now < 3.0:  # small ones come faster than they are served
        small.append(drive.add("p", 4, 8)[0])
        drive.run(until_s=drive.now + 0.02)
    assert big in drive.first_token_s
    # passed for ageing_s, then at most the rest of the small ones then running
    longest_small_s = max(drive.ends[s].time_s - drive.ends[s].scheduled_s for s in first_small)
    assert drive.first_token_s[big] < 0.2 + longest_small_s + 10 * 0.01 + 0.2
    assert any(drive.first_token_s.get(s, 9.0) < drive.first_token_s[big] for s in small)
    drive.run()
    assert all(drive.ends[s].finish_reason is FinishReason.LENGTH for s in (big, *small))
    drive.check_all_ended()


def test_a_flooding_model_does_not_hold_up_the_others_few():
    drive = Drive(a_config(30, max_queue=1000, max_num_seqs=30), [a_model("flood"), a_model("quiet")])
    drive.cluster.durations = {"flood": 0.01, "quiet": 0.01}
    flood = [drive.add("flood", 8, 8)[0] for _ in range(200)]
    drive.run(until_s=1.0)
    quiet = [drive.add("quiet", 8, 8)[0] for _ in range(2)]
    drive.run(until_s=1.6)
    assert all(sequence_id in drive.ends for sequence_id in quiet)
    assert sum(sequence_id in drive.ends for sequence_id in flood) < 150
    drive.run()
    drive.check_all_ended()
