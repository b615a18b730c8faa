"""HostTier against a plain list of what it should hold: contents, ages and frames, whatever the order of calls."""

import random

from hypothesis import given
from hypothesis import strategies as st

from crosspool.kv_pool.host_tier import FrameCopy, HostTier

WIDTHS = {"p": 1, "q": 2, "r": 3}
BUDGET = 12


def key(number: int) -> bytes:
    return number.to_bytes(32)


class World:
    """A tier, the memory it speaks of, and (model, number) of the pages it should hold, the least lately used first."""

    def __init__(self) -> None:
        self.tier = HostTier(BUDGET + 1)
        self.host: dict[int, object] = {}
        self.held: list[tuple[str, int]] = []
        self.device: dict[int, object] = {}
        for model, width in WIDTHS.items():
            self.tier.add_model(model, width)

    def page(self, model: str, number: int) -> tuple[int, ...]:
        first = 1 + 10 * number + 1000 * sorted(WIDTHS).index(model)
        return tuple(range(first, first + WIDTHS[model]))

    def stow(self, model: str, number: int) -> None:
        page = self.page(model, number)
        self.device.update({frame: (model, number, place) for place, frame in enumerate(page)})
        is_new = self.tier.stow(model, key(number), page)
        assert is_new == ((model, number) not in self.held)
        if not is_new:
            self.held.remove((model, number))
        self.held.append((model, number))
        while sum(WIDTHS[name] for name, _ in self.held) > BUDGET:
            del self.held[0]

    def bring_back(self, model: str, number: int) -> None:
        target = tuple(frame + 100_000 for frame in self.page(model, number))
        self.tier.keep(model, [key(number)])
        self.held.append(self.held.pop(self.held.index((model, number))))
        self.tier.bring_back(model, key(number), target)
        self.tier.keep(model, [])
        self.copy()
        assert [self.device[frame] for frame in target] == [(model, number, place) for place in range(WIDTHS[model])]

    def copy(self) -> None:
        for each in self.tier.take_copies():
            for frame, host_frame in zip(each.frames, each.host_frames, strict=True):
                assert 0 < host_frame <= BUDGET
                if each.is_stowed:
                    self.host[host_frame] = self.device[frame]
                else:
                    self.device[frame] = self.host[host_frame]

    def check(self) -> None:
        for model, width in WIDTHS.items():
            numbers = [number for name, number in self.held if name == model]
            assert self.tier.num_frames(model) == width * len(numbers)
            assert [n for n in range(20) if self.tier.num_known(model, [key(n)])] == sorted(numbers)


@given(seed=st.integers(0, 10**6))
def test_it_holds_what_was_used_last_and_gives_back_what_was_stowed(seed):
    rng, world = random.Random(seed), World()
    for _ in range(200):
        model = rng.choice(sorted(WIDTHS))
        here = [number for name, number in world.held if name == model]
        match rng.randrange(8):
            case 0 | 1 | 2 | 3:
                world.stow(model, rng.randrange(8))
            case 4 | 5 | 6 if here:
                world.bring_back(model, rng.choice(here))
            case 7 if rng.random() < 0.2:
                world.tier.forget(model)
                world.held = [found for found in world.held if found[0] != model]
        world.check()
    for model in sorted(WIDTHS):
        world.tier.remove_model(model)


def test_of_one_sequence_the_last_page_goes_first():
    world = World()
    for number in range(4):
        world.stow("r", number)
    keys = [key(number) for number in range(4)]
    world.tier.keep("r", keys)
    assert not world.tier.stow("q", key(9), (1, 2)), "pages that are about to be brought back made room"
    world.tier.keep("r", [])
    assert world.tier.stow("q", key(9), (1, 2))
    assert world.tier.num_known("r", keys) == 3


def test_a_page_that_does_not_fit_at_all_is_dropped():
    tier = HostTier(3)
    tier.add_model("wide", 3)
    assert not tier.stow("wide", key(1), (1, 2, 3))
    assert tier.take_copies() == ()


def test_a_lost_rank_holds_nothing_and_copies_nothing():
    world = World()
    world.stow("p", 1)
    world.tier.clear()
    assert world.tier.num_known("p", [key(1)]) == 0
    assert world.tier.take_copies() == ()


def test_copies_come_in_the_order_in_which_they_were_asked_for():
    tier = HostTier(2)
    tier.add_model("p", 1)
    tier.stow("p", key(1), (5,))
    tier.bring_back("p", key(1), (6,))
    tier.stow("p", key(2), (7,))  # takes the first one's place, after it was read
    assert tier.take_copies() == (
        FrameCopy((5,), (1,), is_stowed=True),
        FrameCopy((6,), (1,), is_stowed=False),
        FrameCopy((7,), (1,), is_stowed=True),
    )
