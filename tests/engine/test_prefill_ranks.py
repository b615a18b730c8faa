"""Which prompts go to a prefill rank, in which order, and what happens when it is away."""

from __future__ import annotations

import pytest

from crosspool.engine.prefill_chunks import Chunk
from crosspool.engine.prefill_ranks import check_whole_model, with_bounded_past
from crosspool.engine.sequence import Sequence
from crosspool.errors import CapacityError
from crosspool.models.whole_size import whole_bytes
from tests.support.core_drive import Drive, a_config, a_model


def drive_of(*names: str, **changes) -> Drive:
    models = [a_model(name, prefill_ranks=("p0",)) for name in names]
    return Drive(a_config(512, prefill_ranks=("p0",), max_num_seqs=64, **changes), models)


def prefills(drive: Drive, since: int = 0) -> list[tuple[str, str | None]]:
    """(model, prefill rank) of each prefill step."""
    steps = drive.cluster.steps[since:]
    return [(step.header.model, step.header.prefill_rank) for step in steps if step.header.phase == "prefill"]


def test_prompts_run_on_the_prefill_rank_and_decode_in_the_pools():
    drive = drive_of("a")
    drive.add("a", prompt=40, max_tokens=4)
    drive.run()
    assert prefills(drive) == [("a", "p0")] * 3
    assert {step.header.prefill_rank for step in drive.cluster.steps if step.header.phase == "decode"} == {None}
    drive.check_all_ended()


def test_the_rank_stays_with_a_model_while_it_has_prompts_of_about_the_same_age():
    drive = drive_of("a", "b")
    drive.cluster.durations.update(a=0.001, b=0.001)
    for _ in range(6):
        for name in "ab":
            drive.add(name, prompt=16, max_tokens=1)
        drive.now += 1e-9  # far less than a switch
    drive.run()
    order = [model for model, _ in prefills(drive)]
    assert order == ["a"] * 6 + ["b"] * 6
    assert drive.core.stats(drive.now).prefill_switches == {"p0": 2}
    drive.check_all_ended()


def test_a_rank_that_was_away_while_nobody_asked_comes_back_empty():
    drive = drive_of("a")
    drive.add("a", prompt=16, max_tokens=1)
    drive.run()
    drive.cluster.lose("p0", drive.now, back_in_s=0.1)
    drive.run()
    drive.add("a", prompt=16, max_tokens=1)
    drive.run()
    assert prefills(drive) == [("a", "p0")] * 2
    assert drive.core.stats(drive.now).prefill_switches == {"p0": 2}


def test_without_a_prefill_rank_two_models_take_turns():
    drive = Drive(a_config(512, max_num_seqs=64), [a_model("a"), a_model("b")])
    for _ in range(3):
        for name in "ab":
            drive.add(name, prompt=16, max_tokens=1)
    drive.run()
    assert prefills(drive) == [("a", None), ("b", None)] * 3


def test_while_the_rank_is_away_prompts_run_in_the_pools_and_its_step_is_replayed_there():
    drive = drive_of("a")
    drive.cluster.durations["a"] = 0.01
    drive.add("a", prompt=64, max_tokens=4)
    drive.turn()
    assert prefills(drive) == [("a", "p0")]
    drive.cluster.lose("p0", drive.now, back_in_s=5.0)
    drive.run(until_s=drive.now + 1.0)
    assert prefills(drive)[1:] == [("a", None)] * 4, "the replay, and the three chunks after it"
    assert len(drive.ends) == 1
    drive.run()
    count = len(drive.cluster.steps)
    drive.add("a", prompt=16, max_tokens=1)
    drive.run()
    assert prefills(drive, count) == [("a", "p0")], "it is back and is not used"
    drive.check_all_ended()


def test_prompts_need_no_weights_rank():
    drive = drive_of("a")
    drive.cluster.durations["a"] = 0.01
    drive.cluster.lose("w0", drive.now, back_in_s=2.0)
    drive.add("a", prompt=16, max_tokens=3)
    drive.run(until_s=drive.now + 1.0)
    assert prefills(drive) == [("a", "p0")]
    drive.run()
    drive.check_all_ended()


def test_a_model_that_the_rank_does_not_hold_runs_in_the_pools():
    drive = Drive(a_config(512, prefill_ranks=("p0",)), [a_model("a", prefill_ranks=("p0",)), a_model("b")])
    drive.add("a", prompt=16, max_tokens=1)
    drive.add("b", prompt=16, max_tokens=1)
    drive.run()
    assert set(prefills(drive)) == {("a", "p0"), ("b", None)}
    drive.check_all_ended()


def test_a_chunk_of_few_tokens_runs_in_the_pools_and_waits_for_them():
    drive = drive_of("a", rerun_tokens=8)
    drive.add("a", prompt=40, max_tokens=1)  # chunks of 16, 16 and 8
    drive.run()
    assert prefills(drive) == [("a", "p0"), ("a", "p0"), ("a", None)]
    drive.cluster.durations["a"] = 0.01
    drive.cluster.lose("w0", drive.now, back_in_s=2.0)
    count = len(drive.cluster.steps)
    drive.add("a", prompt=8, max_tokens=1)
    drive.run(until_s=drive.now + 1.0)
    assert prefills(drive, count) == []
    drive.run()
    assert prefills(drive, count) == [("a", None)]
    drive.check_all_ended()


def test_a_step_tells_the_rank_which_model_comes_next():
    drive = drive_of("a", "b")
    drive.cluster.durations.update(a=0.001, b=0.001)
    for name in "ab":
        drive.add(name, prompt=16, max_tokens=1)
    drive.run()
    headers = [step.header for step in drive.cluster.steps if step.header.phase == "prefill"]
    assert [(header.model, header.next_model) for header in headers] == [("a", "b"), ("b", None)]


def test_between_models_that_are_in_place_at_once_the_older_prompt_comes_first():
    for room, wanted in ((0, ["a", "b", "b", "a"]), (1 << 40, ["a", "b", "a", "b"])):
        drive = drive_of("a", "b", prefill_pool_bytes=room)
        drive.cluster.durations.update(a=0.001, b=0.001)
        for _ in range(2):
            for name in "ab":
                drive.add(name, prompt=16, max_tokens=1)
                drive.now += 1e-9  # far less than a switch
            drive.run()
        assert [model for model, _ in prefills(drive)] == wanted
        assert drive.core.stats(drive.now).prefill_switches == {"p0": 2 if room else 3}


def test_what_crosses_at_once_is_bounded_but_for_a_single_sequence():
    drive = drive_of("a")
    ids = [drive.add("a", prompt=8)[0] for _ in range(3)]
    sequences: list[Sequence] = [drive.core._sequences[number] for number in ids]
    for sequence, cached in zip(sequences, (30, 20, 1), strict=True):
        sequence.num_cached_tokens = cached
    chunks = [Chunk(sequence, 1) for sequence in sequences]
    assert with_bounded_past(chunks, 50) == chunks[:2]
    assert with_bounded_past(chunks, 51) == chunks
    assert with_bounded_past(chunks, 10) == chunks[:1]


def test_a_model_that_comes_later_must_fit_the_room_and_the_hosts_memory():
    def check(model, *others, **bounds):
        check_whole_model(model, others, a_config(512, prefill_ranks=("p0",), **bounds))

    first, second = (a_model(name, prefill_ranks=("p0",)) for name in "ab")
    size = whole_bytes(first.spec)
    check(second, first, prefill_pool_bytes=size, prefill_host_bytes=2 * size)
    check(second, first)
    check(a_model("b"), first, prefill_pool_bytes=1, prefill_host_bytes=1)
    with pytest.raises(CapacityError, match=r"^b takes .* whole and prefill_pool_bytes is .*; set at least"):
        check(second, first, prefill_pool_bytes=size - 1)
    with pytest.raises(
        CapacityError, match=r"^b takes .* of host memory .*, beside .* of a, and each may use .*; unload"
    ):
        check(second, first, prefill_host_bytes=2 * size - 1)
    check(second, second, a_model("c"), prefill_host_bytes=size)


def test_models_in_place_are_counted_as_the_rank_counts_them():
    """Two models of which the weights alone would fit at once, but not as they lie there, take turns."""
    drive = drive_of("a", "b", prefill_pool_bytes=2 * whole_bytes(a_model("a").spec) - 1)
    for name in "abab":
        drive.add(name, prompt=16, max_tokens=1)
        drive.run()
    assert drive.core.stats(drive.now).prefill_switches == {"p0": 4}
    drive = drive_of("a", "b", prefill_pool_bytes=2 * whole_bytes(a_model("a").spec))
    for name in "abab":
        drive.add(name, prompt=16, max_tokens=1)
        drive.run()
    assert drive.core.stats(drive.now).prefill_switches == {"p0": 2}
