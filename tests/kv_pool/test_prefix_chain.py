"""PrefixChain: a key stands for its model, its salt and every token up to the end of its page."""

from hypothesis import given
from hypothesis import strategies as st

from crosspool.kv_pool.prefix_cache import PrefixChain, page_key, root_key

tokens = st.lists(st.integers(0, 3), max_size=12)
salts = st.sampled_from([None, "", "a", "b"])
models = st.sampled_from(["p", "q"])


def keys(model: str, salt: str | None, page_tokens: int, token_ids: list[int]) -> list[bytes]:
    chain = PrefixChain(model, salt, page_tokens)
    return list(chain.reach(len(token_ids) // page_tokens, lambda start, stop: token_ids[start:stop]))


@given(st.tuples(models, salts, tokens), st.tuples(models, salts, tokens), st.integers(1, 4))
def test_two_pages_have_the_same_key_where_all_before_their_ends_is_the_same(one, other, page_tokens):
    first, second = keys(one[0], one[1], page_tokens, one[2]), keys(other[0], other[1], page_tokens, other[2])
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        stop = (index + 1) * page_tokens
        assert (a == b) == (one[:2] == other[:2] and one[2][:stop] == other[2][:stop])
    assert not set(first) & set(second[len(first) :])


@given(tokens, st.integers(1, 4), st.data())
def test_a_chain_grows_with_its_sequence_and_keeps_its_keys(token_ids, page_tokens, data):
    chain = PrefixChain("p", None, page_tokens)
    known = 0
    while known < len(token_ids):
        known = data.draw(st.integers(known + 1, len(token_ids)))
        chain.reach(known // page_tokens, lambda start, stop, known=known: token_ids[:known][start:stop])
    assert chain.keys == keys("p", None, page_tokens, token_ids)


def test_keys_are_too_long_to_be_forged_and_the_same_on_every_run():
    assert len(root_key("p", None)) == 32
    assert page_key(root_key("p", None), [1, 2, 3]).hex().startswith("d772cb67a688b257")


def test_names_and_salts_do_not_run_into_each_other():
    assert len({root_key("ab", "c"), root_key("a", "bc"), root_key('a", "b', "c"), root_key("ab", None)}) == 4


@given(tokens, st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8), st.integers(1, 4))
def test_a_fork_goes_its_own_way(prompt, one, other, page_tokens):
    chain = PrefixChain("p", "s", page_tokens)
    tokens_of = [*prompt, *one]
    chain.reach(len(tokens_of) // page_tokens, lambda start, stop: tokens_of[start:stop])
    fork = chain.fork(len(prompt) // page_tokens)
    others = [*prompt, *other]
    fork.reach(len(others) // page_tokens, lambda start, stop: others[start:stop])
    assert fork.keys == keys("p", "s", page_tokens, others)
    assert chain.keys == keys("p", "s", page_tokens, tokens_of)
