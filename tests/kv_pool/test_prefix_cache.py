"""PrefixCache: random operations against a plain twin; who goes first; nobody's page is evicted under its user."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from crosspool.kv_pool.prefix_cache import PrefixCache

MODELS = ("p", "q", "r")
KEYS = [bytes([letter]) * 32 for letter in range(6)]


class CacheMachine(RuleBasedStateMachine):
    """Pages come in, are used and left, and go. The twin is a list of reusable pages, oldest first, and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache()
        self.users: dict[tuple[str, bytes], set[int]] = {}
        self.pages: dict[tuple[str, bytes], tuple[int, ...]] = {}
        self.resting: list[tuple[str, bytes]] = []
        self.next_frame = 1
        for model in MODELS:
            self.cache.add_model(model)

    @rule(model=st.sampled_from(MODELS), key=st.sampled_from(KEYS), user=st.none() | st.integers(0, 3))
    def insert(self, model, key, user):
        page = (self.next_frame,)
        self.next_frame += 1
        cached = self.cache.insert(model, key, page, user)
        assert (cached is None) == ((model, key) in self.users)
        if cached is None:
            return
        self.users[model, key] = set() if user is None else {user}
        self.pages[model, key] = page
        if user is None:
            self.resting.append((model, key))

    @precondition(lambda self: self.users)
    @rule(data=st.data(), user=st.integers(0, 3))
    def use(self, data, user):
        place = data.draw(st.sampled_from(sorted(self.users)))
        self.cache.add_user(self.cache.get(*place), user)
        self.users[place].add(user)
        if place in self.resting:
            self.resting.remove(place)

    @precondition(lambda self: any(self.users.values()))
    @rule(data=st.data())
    def leave(self, data):
        place = data.draw(st.sampled_from(sorted(place for place, users in self.users.items() if users)))
        user = data.draw(st.sampled_from(sorted(self.users[place])))
        self.cache.remove_user(self.cache.get(*place), user)
        self.users[place].remove(user)
        if not self.users[place]:
            self.resting.append(place)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def touch(self, data):
        place = data.draw(st.sampled_from(sorted(self.users)))
        self.cache.touch(self.cache.get(*place))
        if place in self.resting:
            self.resting.remove(place)
            self.resting.append(place)

    @rule(models=st.sets(st.sampled_from(MODELS)))
    def evict(self, models):
        oldest = self.cache.oldest(models)
        wanted = next((place for place in self.resting if place[0] in models), None)
        assert (None if oldest is None else (oldest.model, oldest.key)) == wanted
        if oldest is not None:
            assert self.cache.evict(oldest) == self.pages[wanted]
            self.forget(wanted)

    @rule(model=st.sampled_from(MODELS))
    def clear(self, model):
        gone = [place for place in self.resting if place[0] == model]
        assert self.cache.clear(model) == [self.pages[place] for place in gone]
        for place in gone:
            self.forget(place)

    @precondition(lambda self: any(not self.in_use(model) for model in MODELS))
    @rule(data=st.data())
    def replace_model(self, data):
        model = data.draw(st.sampled_from([model for model in MODELS if not self.in_use(model)]))
        own = [place for place in self.users if place[0] == model]
        assert sorted(self.cache.remove_model(model)) == sorted(self.pages[place] for place in own)
        self.cache.add_model(model)
        for place in own:
            self.forget(place)

    def in_use(self, model):
        return any(users for place, users in self.users.items() if place[0] == model)

    def forget(self, place):
        del self.users[place]
        self.resting.remove(place)

    @invariant()
    def cache_and_twin_agree(self):
        for model in MODELS:
            own = [place for place in self.users if place[0] == model]
            assert self.cache.num_pages(model) == len(own)
            assert self.cache.num_reusable(model) == sum(not self.users[place] for place in own)
            for key in KEYS:
                cached = self.cache.get(model, key)
                assert (cached is not None) == ((model, key) in self.users)
                if cached is not None:
                    assert cached.page == self.pages[model, key]
                    assert cached.users == self.users[model, key]


TestCacheMachine = CacheMachine.TestCase


def a_cache(*models: str) -> PrefixCache:
    cache = PrefixCache()
    for model in models:
        cache.add_model(model)
    return cache


def test_a_match_ends_at_the_first_page_that_is_missing():
    cache = a_cache("p", "q")
    for number in (0, 1, 3):
        cache.insert("p", KEYS[number], (number + 1,), user=None)
    assert [page.page for page in cache.match("p", KEYS)] == [(1,), (2,)]
    assert cache.match("q", KEYS) == []


def test_the_page_left_first_goes_first_whatever_its_model():
    cache = a_cache("p", "q")
    pages = [cache.insert(model, KEYS[number], (number + 1,), user=1) for number, model in enumerate("pqp")]
    for page in (pages[1], pages[2], pages[0]):
        cache.remove_user(page, 1)
    order = []
    while (oldest := cache.oldest("pq")) is not None:
        order.append(cache.evict(oldest))
    assert order == [(2,), (3,), (1,)]


def test_a_model_with_users_cannot_be_forgotten():
    cache = a_cache("p")
    cache.insert("p", KEYS[0], (1,), user=7)
    with pytest.raises(AssertionError, match="still have users"):
        cache.remove_model("p")
