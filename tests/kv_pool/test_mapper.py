"""What is mapped and unmapped next, decided without a driver: order, epochs, failures."""

from __future__ import annotations

import pytest

from crosspool.kv_pool.backing.mapped_page import PageState
from crosspool.kv_pool.backing.mapper import MAX_FAILURES, Mapper
from crosspool.kv_pool.backing.operations import FreeRange, MapPage, Operation, UnmapPage


def a_mapper() -> Mapper:
    mapper = Mapper()
    mapper.add_model("p", 0, frames_per_page=1, num_spots=8)
    mapper.add_model("q", 1000, frames_per_page=2, num_spots=4)
    return mapper


def work(mapper: Mapper, now: float = 0.0) -> list[str]:
    """Everything that can be done, in words."""
    done = []
    while (operation := mapper.next_operation(now)) is not None:
        done.append(words(operation))
        mapper.ended(operation, None, now)
    return done


def words(operation: Operation) -> str:
    match operation:
        case MapPage(page):
            return f"map {page.model_range.model}{page.page}"
        case UnmapPage(page):
            return f"unmap {page.model_range.model}{page.page}"
        case FreeRange(model_range):
            return f"free {model_range.model}"


def test_what_a_step_waits_for_comes_before_what_is_expected():
    mapper = a_mapper()
    mapper.expect("p", [(1,), (2,)])
    mapper.use("q", 7, [(3, 4)])
    assert work(mapper) == ["map q(3, 4)", "map p(1,)", "map p(2,)"]


def test_a_page_that_was_expected_is_there_when_it_is_used():
    mapper = a_mapper()
    mapper.expect("q", [(1, 2)])
    work(mapper)
    (page,) = mapper.use("q", 7, [(1, 2)])
    assert page.is_mapped
    assert page.frames == (1, 2)  # of the range: the first spot
    assert work(mapper) == []


def test_frames_leave_their_old_place_before_they_get_a_new_one():
    mapper = a_mapper()
    mapper.use("q", 7, [(1, 2)])
    work(mapper)
    mapper.forget([7])
    mapper.use("p", 8, [(2,)])
    assert work(mapper) == ["unmap q(1, 2)", "map p(2,)"]


def test_a_page_that_was_expected_in_vain_is_not_mapped_any_more():
    mapper = a_mapper()
    mapper.expect("p", [(1,), (2,)])
    mapper.use("q", 7, [(2, 3)])
    assert work(mapper) == ["map q(2, 3)", "map p(1,)"]
    mapper.forget([7])
    mapper.give_back("q", [(2, 3)])
    assert work(mapper) == ["unmap q(2, 3)"]


def test_frames_that_are_in_use_are_left_out_of_what_another_model_expects():
    """Also where its page is of the same frames."""
    mapper = a_mapper()
    mapper.add_model("r", 2000, frames_per_page=2, num_spots=4)
    mapper.use("q", 7, [(1, 2)])
    mapper.expect("r", [(1, 2), (2, 3), (4, 5)])
    assert work(mapper) == ["map q(1, 2)", "map r(4, 5)"]
    mapper.forget([7])
    mapper.expect("r", [(1, 2)])
    assert work(mapper) == ["unmap q(1, 2)", "map r(1, 2)"]


def test_unused_pages_stay_mapped_until_somebody_wants_their_frames_or_they_are_given_back():
    mapper = a_mapper()
    mapper.use("p", 7, [(1,), (2,)])
    work(mapper)
    mapper.forget([7])
    assert work(mapper) == []
    mapper.give_back("p", [(2,), (5,)])
    assert work(mapper) == ["unmap p(2,)"]
    assert mapper.num_mapped_frames == 1


def test_a_used_page_is_not_given_back_and_its_frames_cannot_be_taken():
    mapper = a_mapper()
    mapper.use("p", 7, [(1,)])
    mapper.use("p", 8, [(1,)])  # a prefix that both have
    work(mapper)
    mapper.forget([7])
    mapper.give_back("p", [(1,)])
    mapper.expect("q", [(1, 2)])
    assert work(mapper) == []
    with pytest.raises(AssertionError, match="frame 1 of a page of q is in use by \\[8\\]"):
        mapper.use("q", 9, [(1, 2)])


def test_a_page_leaves_only_after_the_steps_that_could_touch_it():
    mapper = a_mapper()
    mapper.begin_step("early", [7])
    mapper.use("p", 7, [(1,)])
    work(mapper)
    mapper.begin_step("middle", [9])
    mapper.forget([7])
    mapper.begin_step("late", [9])
    mapper.use("q", 8, [(1, 2)])
    assert work(mapper) == []
    mapper.end_step("early")
    assert work(mapper) == []
    mapper.end_step("middle")
    assert work(mapper) == ["unmap p(1,)", "map q(1, 2)"]


def test_steps_of_others_keep_nobodys_pages():
    mapper = a_mapper()
    mapper.use("p", 7, [(1,)])
    work(mapper)
    mapper.begin_step("another's", [9])
    mapper.forget([7])
    mapper.use("q", 8, [(1, 2)])
    assert work(mapper) == ["unmap p(1,)", "map q(1, 2)"]


def test_a_page_that_is_wanted_again_while_it_leaves_is_mapped_again():
    mapper = a_mapper()
    mapper.use("p", 7, [(1,)])
    work(mapper)
    mapper.forget([7])
    mapper.give_back("p", [(1,)])
    operation = mapper.next_operation(0.0)
    (page,) = mapper.use("p", 8, [(1,)])
    assert page.state is PageState.UNMAPPING
    mapper.ended(operation, None, 0.0)
    assert work(mapper) == ["map p(1,)"]


def test_a_doomed_page_that_is_wanted_again_takes_its_frames_back():
    mapper = a_mapper()
    mapper.use("q", 7, [(1, 2)])
    work(mapper)
    mapper.forget([7])
    mapper.expect("p", [(1,)])
    mapper.use("q", 8, [(1, 2)])  # the engine has put the same page together once more
    assert work(mapper) == []
    assert mapper.use("q", 8, [(1, 2)])[0].is_mapped


def test_a_failed_map_rests_and_is_tried_again_then_its_waiter_is_told():
    mapper = a_mapper()
    (page,) = mapper.use("p", 7, [(1,)])
    now = 0.0
    for attempt in range(MAX_FAILURES):
        operation = mapper.next_operation(now)
        assert isinstance(operation, MapPage)
        mapper.ended(operation, "cuMemMap failed: OUT_OF_MEMORY", now)
        if attempt + 1 < MAX_FAILURES:
            assert mapper.next_operation(now) is None
            retry_s = mapper.retry_s()
            assert retry_s > now
            now = retry_s
    assert page.error == "cuMemMap failed: OUT_OF_MEMORY"
    assert mapper.next_operation(now + 10.0) is None
    mapper.forget([7])
    assert work(mapper, now) == []
    assert not mapper.use("p", 8, [(1,)])[0].is_mapped
    assert work(mapper, now) == ["map p(1,)"]


def test_after_a_failed_map_idle_pages_are_given_up():
    mapper = a_mapper()
    mapper.use("p", 7, [(1,), (2,)])
    work(mapper)
    mapper.forget([7])
    mapper.use("q", 8, [(3, 4)])
    operation = mapper.next_operation(0.0)
    mapper.ended(operation, "cuMemMap failed: OUT_OF_MEMORY", 0.0)
    assert work(mapper) == ["unmap p(1,)", "unmap p(2,)"]
    assert work(mapper, 1.0) == ["map q(3, 4)"]


def test_a_failed_unmap_is_tried_again_and_frames_wait_for_it():
    mapper = a_mapper()
    mapper.use("p", 7, [(1,)])
    work(mapper)
    mapper.forget([7])
    mapper.use("q", 8, [(1, 2)])
    mapper.ended(mapper.next_operation(0.0), "cuMemUnmap failed: UNKNOWN", 0.0)
    assert work(mapper, 0.0) == []
    assert work(mapper, 1.0) == ["unmap p(1,)", "map q(1, 2)"]


def test_a_removed_models_range_goes_when_its_last_page_has_left():
    mapper = a_mapper()
    mapper.begin_step("running", [7])
    mapper.use("p", 7, [(1,)])
    mapper.expect("p", [(2,)])
    work(mapper)
    mapper.remove_model("p")
    assert work(mapper) == ["unmap p(2,)"], "nothing has touched it"
    mapper.add_model("p", 5000, frames_per_page=1, num_spots=8)  # of the same name, at other addresses
    mapper.end_step("running")
    assert work(mapper) == ["unmap p(1,)", "free p"]
    assert not mapper.has_backlog


def test_pages_of_a_removed_model_whose_sequences_were_forgotten_wait_for_no_step():
    mapper = a_mapper()
    mapper.use("p", 7, [(1,)])
    work(mapper)
    mapper.begin_step("of another lane", [8])
    mapper.forget([7])
    mapper.remove_model("p")
    mapper.begin_step("next", [9])
    mapper.use("q", 9, [(1, 2)])
    assert work(mapper)[:2] == ["unmap p(1,)", "map q(1, 2)"]
