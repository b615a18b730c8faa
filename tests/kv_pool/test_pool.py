"""KVPool and BlockTable: random operations never give a frame two owners nor lose one."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as HypothesisBundle
from hypothesis.stateful import RuleBasedStateMachine, consumes, invariant, precondition, rule

from crosspool.kv_pool.block_table import BlockTable
from crosspool.kv_pool.pool import KVPool

WIDTHS = {"p": 1, "q": 3, "r": 4}


class PoolMachine(RuleBasedStateMachine):
    """Three models of different page widths take and give back pages."""

    held = HypothesisBundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(20)
        self.used = dict.fromkeys(WIDTHS, 0)
        self.frames: set[int] = set()
        for name, width in WIDTHS.items():
            self.pool.add_model(name, width)

    @rule(target=held, model=st.sampled_from(list(WIDTHS)), num_pages=st.integers(0, 6))
    def allocate(self, model, num_pages):
        free = self.pool.num_free
        pages = self.pool.allocate(model, num_pages)
        fits = num_pages * WIDTHS[model] <= free
        assert (pages is not None) == fits
        if pages is None:
            assert self.pool.num_free == free
            return model, ()
        assert len(pages) == num_pages
        for page in pages:
            assert len(page) == WIDTHS[model]
            for frame in page:
                assert 0 < frame < 20
                assert frame not in self.frames, "handed out twice"
                self.frames.add(frame)
        self.used[model] += num_pages * WIDTHS[model]
        return model, pages

    @rule(entry=consumes(held))
    def free(self, entry):
        model, pages = entry
        self.pool.free(model, pages)
        for page in pages:
            self.frames -= set(page)
        self.used[model] -= sum(len(page) for page in pages)

    @precondition(lambda self: self.used["r"] == 0)
    @rule()
    def replace_model(self):
        self.pool.remove_model("r")
        self.pool.add_model("r", WIDTHS["r"])

    @invariant()
    def the_budget_adds_up(self):
        assert {name: self.pool.used(name) for name in WIDTHS} == self.used
        assert sum(self.used.values()) + self.pool.num_free == self.pool.budget == 19
        assert len(self.frames) == sum(self.used.values())


TestPoolMachine = PoolMachine.TestCase


def test_a_page_freed_twice_or_by_another_model_is_caught():
    pool = KVPool(8)
    pool.add_model("p", 1)
    pool.add_model("q", 1)
    pages = pool.allocate("p", 2)
    assert pages is not None
    with pytest.raises(AssertionError, match="belongs to p"):
        pool.free("q", pages)
    pool = KVPool(8)
    pool.add_model("p", 1)
    pages = pool.allocate("p", 2)
    pool.free("p", pages)
    with pytest.raises(AssertionError, match="belongs to None"):
        pool.free("p", pages)


def test_a_model_gets_back_the_pages_that_it_gave_the_youngest_first():
    pool = KVPool(20)
    for model in ("p", "q"):
        pool.add_model(model, 3)
    pages = pool.allocate("p", 3)
    pool.free("p", pages)
    assert pool.stock("p", 2) == ((10, 11, 12), (13, 14, 15))
    assert pool.allocate("p", 4) == (*reversed(pages), (10, 11, 12)), "what was stocked lies under what it had"
    assert pool.allocate("q", 2) == ((16, 17, 18), (13, 14, 15)), "frames that nobody used before another's page"


def test_pages_that_no_step_has_used_go_on_no_shelf():
    pool = KVPool(10)
    pool.add_model("p", 2)
    pages = pool.allocate("p", 2)
    pool.free("p", pages, was_used=False)
    assert (pool.num_shelved("p"), pool.num_free, pool.num_loose) == (0, 9, 9)


def test_the_shelf_of_the_model_idle_for_longest_is_taken_apart_first():
    pool = KVPool(13)
    for model in ("p", "q", "r"):
        pool.add_model(model, 2)
    kept = {model: pool.allocate(model, 3) for model in ("q", "p")}
    for model, pages in kept.items():
        pool.free(model, pages)
    pool.taken_apart = []
    (page,) = pool.allocate("r", 1)
    assert {frame for frame in page} <= {frame for frames in kept["q"] for frame in frames}
    assert [model for model, _ in pool.taken_apart] == ["q"] * 3
    assert (pool.num_shelved("q"), pool.num_shelved("p")) == (0, 3)


def test_bad_sizes_and_names_are_refused():
    with pytest.raises(ValueError, match="1 frames has none"):
        KVPool(1)
    pool = KVPool(4)
    pool.add_model("p", 1)
    with pytest.raises(ValueError, match="already has a model p"):
        pool.add_model("p", 2)
    with pytest.raises(ValueError, match="has 0 frames"):
        pool.add_model("q", 0)
    pool.allocate("p", 2)
    with pytest.raises(ValueError, match="still holds 2 frames"):
        pool.remove_model("p")


def test_a_block_table_tells_each_page_once():
    table = BlockTable(page_tokens=4)
    assert [table.num_missing(tokens) for tokens in (0, 1, 4, 5, 9)] == [0, 1, 1, 2, 3]
    table.extend(((1,), (2,)))
    assert table.take_unsent() == (0, ((1,), (2,)))
    assert table.take_unsent() == (2, ())
    table.extend(((5,),))
    assert table.num_missing(12) == 0
    assert table.num_missing(13) == 1
    assert table.take_unsent() == (2, ((5,),))
    assert table.clear() == [(1,), (2,), (5,)]
    table.extend(((7,),))
    assert table.take_unsent() == (0, ((7,),))


def test_frames_that_are_withdrawn_are_nobodys_until_they_are_restored():
    pool = KVPool(11)
    pool.add_model("a", 2)
    held = pool.allocate("a", 1)
    pool.free("a", pool.allocate("a", 1))
    assert pool.num_shelved("a") == 1
    frames = pool.withdraw(7)
    assert len(set(frames)) == 7
    assert not set(frames) & set(held[0])
    assert pool.withdrawn == frames
    assert pool.num_free == 1
    assert pool.allocate("a", 1) is None
    assert pool.withdraw(5) == pool.withdrawn[7:]
    assert (pool.num_free, pool.num_withdrawn) == (0, 8), "what is held stays"
    restored = pool.restore(3)
    assert len(restored) == 3
    assert pool.num_free == 3
    (page,) = pool.allocate("a", 1)
    assert set(page) <= set(restored)
    pool.restore(100)
    assert pool.num_withdrawn == 0
    assert pool.num_free == 6
