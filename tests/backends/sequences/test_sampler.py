"""Sampling: each option by hand, all cuts against a plain loop, and that no row feels its neighbours."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosspool.backends.sequences.philox import UniformStream, uniforms
from crosspool.backends.sequences.sampler import LOGPROB_FLOOR, SamplingRow, sample
from crosspool.core import SamplingParams

GREEDY = SamplingParams(max_tokens=100, temperature=0.0)
WARM = SamplingParams(max_tokens=100, temperature=1.0, seed=1234)


def row(params, prompt=(1, 2), output=(), sequence_id=0, replayed=()):
    tokens = [*prompt, *output, *replayed]
    position = len(prompt) + len(output)
    return SamplingRow(sequence_id, params, tokens, len(prompt), position, UniformStream(params.seed))


def draw(logits, *rows):
    logits = np.array(logits, dtype=np.float32)
    logits = np.tile(logits, (len(rows), 1)) if logits.ndim == 1 else logits
    return [sampled.token_id for sampled in sample(logits, rows)]


def random_logits(seed, num_rows, vocab_size=50):
    return np.random.default_rng(seed).standard_normal((num_rows, vocab_size)).astype(np.float32) * 3


def plain_draw(logits, params, uniform):
    """The documented rule as a loop over one row."""
    scaled = logits.astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    ranking = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    kept = [token for token in ranking if weights[token] >= params.min_p * weights.max()]
    kept = kept[: params.top_k or None]
    total, before, nucleus = sum(weights[kept]), 0.0, []
    for token in kept:
        if nucleus and before >= params.top_p * total:
            break
        nucleus.append(token)
        before += weights[token]
    target, cumulative = uniform * sum(weights[nucleus]), 0.0
    for token in sorted(nucleus):
        cumulative += weights[token]
        if cumulative > target:
            return token
    raise AssertionError("the random number is not below one")


@pytest.mark.fuzz
@given(
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.3, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 3, 20, 50, 51, 10**6]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_cuts_equal_the_plain_loop(seed, temperature, top_k, top_p, min_p):
    params = replace(WARM, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    logits = random_logits(seed, 3)
    rows = [row(params, output=(0,) * idx) for idx in range(3)]
    expected = [plain_draw(logits[idx], params, uniforms(seed, 2 + idx, 1)[0]) for idx in range(3)]
    assert draw(logits, *rows) == expected


def test_frequencies_follow_the_softmax():
    logits = np.array([[0.0, 1.0, 2.0, -1.0]], dtype=np.float32)
    num_draws = 20000
    uniform = UniformStream(WARM.seed)
    rows = [SamplingRow(0, WARM, (), 0, position, uniform) for position in range(num_draws)]
    tokens = draw(np.tile(logits, (num_draws, 1)), *rows)
    shares = np.bincount(tokens, minlength=4) / num_draws
    expected = np.exp(logits[0]) / np.exp(logits[0]).sum()
    assert np.abs(shares - expected).max() < 0.015  # more than four standard deviations


def test_equal_logits_go_to_the_lowest_id_when_greedy_or_top_k_is_one():
    logits = [0.0, 5.0, 5.0, 5.0]
    assert draw(logits, row(GREEDY), row(replace(WARM, top_k=1))) == [1, 1]


def test_logits_that_are_no_distribution_neither_raise_nor_touch_the_neighbour():
    nan, inf = np.full(50, np.nan, dtype=np.float32), random_logits(8, 1)[0]
    inf[13] = np.inf
    nothing = np.full(50, -np.inf, dtype=np.float32)
    good = random_logits(8, 1)[0]
    params = replace(WARM, top_p=0.9, top_k=5, min_p=0.01, num_logprobs=3)
    sampled = sample(np.stack([nan, inf, nothing, good]), [row(params) for _ in range(4)])
    assert sampled[1].token_id == 13
    assert all(0 <= item.token_id < 50 for item in sampled)
    assert all(np.isfinite(item.logprob) for item in sampled)
    assert sampled[3].token_id == draw(good, row(params))[0]


def test_top_p_stops_once_the_mass_is_reached_not_when_it_is_passed():
    rows = [row(replace(WARM, top_p=0.5), output=(0,) * idx) for idx in range(50)]
    assert set(draw([0.0, 0.0], *rows)) == {0}


def test_top_k_keeps_exactly_k_of_equal_logits():
    rows = [row(replace(WARM, top_k=2), output=(0,) * idx) for idx in range(200)]
    assert set(draw([1.0] * 6, *rows)) == {0, 1}


@pytest.mark.parametrize(
    "params",
    [
        *(replace(WARM, temperature=value) for value in (1e-4, 1e-7, 1e-30)),
        replace(WARM, top_p=1e-6),
        replace(WARM, top_p=0.0),
        replace(WARM, min_p=1.0),
        replace(WARM, temperature=1e-4, top_p=1e-6, min_p=1.0),
        replace(WARM, top_k=1),
    ],
    ids=repr,
)
def test_a38_tiny_temperature_or_top_p_equals_greedy(params):
    logits = random_logits(3, 64)
    logits[:, 7] = -np.inf
    logits[5, 9] -= 100
    rows = [row(params, output=(0,) * idx) for idx in range(64)]
    assert draw(logits, *rows) == logits.argmax(axis=-1).tolist()


def test_minus_infinity_is_never_drawn():
    logits = np.full(8, -np.inf, dtype=np.float32)
    logits[3], logits[6] = 0.0, 0.1
    rows = [row(replace(WARM, top_k=top_k), output=(0,) * idx) for idx in range(50) for top_k in (0, 5)]
    assert set(draw(logits, *rows)) == {3, 6}


def test_a39_a_seed_gives_the_same_token_whoever_is_beside():
    logits = random_logits(5, 4)
    seeded = replace(WARM, temperature=0.9)
    for position in range(24):
        mine = row(seeded, output=(0,) * position)
        others = [row(replace(WARM, seed=7)), row(GREEDY), row(replace(WARM, top_p=0.5, presence_penalty=1.0))]
        alone = draw(logits[:1], mine)
        assert draw(logits, mine, *others)[0] == alone[0]
        assert draw(logits[[1, 2, 0]], others[0], others[1], mine)[2] == alone[0]


def test_a39_other_seeds_and_positions_give_other_tokens():
    flat = np.zeros((1, 1000), dtype=np.float32)
    tokens = {draw(flat, row(replace(WARM, seed=seed)))[0] for seed in range(30)}
    tokens |= {draw(flat, row(WARM, output=(0,) * idx))[0] for idx in range(30)}
    assert len(tokens) > 50


def test_a_replayed_row_draws_the_same_token_although_it_is_already_written():
    logits = random_logits(11, 1)
    params = replace(WARM, repetition_penalty=1.5, frequency_penalty=1.0, min_tokens=4, stop_token_ids=(3,))
    first = draw(logits, row(params, output=(5, 6)))
    assert draw(logits, row(params, output=(5, 6), replayed=first)) == first


class TestA40Penalties:
    """Presence and frequency count generated tokens; repetition looks at prompt and output; neighbours never count."""

    LOGITS = (2.0, 1.9, 1.8, -1.0)

    def changed(self, params, prompt, output):
        """Logits after the penalties, seen through top log-probabilities of a very long ranking."""
        logits = np.array([self.LOGITS, self.LOGITS], dtype=np.float32)
        rows = [row(params, prompt, output), row(GREEDY, prompt=(3, 3), output=(3,))]
        sample(logits, rows)
        assert logits[1].tolist() == np.array(self.LOGITS, dtype=np.float32).tolist()
        return logits[0].tolist()

    def test_presence_is_taken_once_from_each_generated_token(self):
        params = replace(GREEDY, presence_penalty=2.0)
        assert self.changed(params, (0, 0, 0), (1, 1)) == pytest.approx([2.0, -0.1, 1.8, -1.0])

    def test_frequency_is_taken_as_often_as_a_token_was_generated(self):
        params = replace(GREEDY, frequency_penalty=0.5)
        assert self.changed(params, (0, 0, 0), (1, 1, 2)) == pytest.approx([2.0, 0.9, 1.3, -1.0])

    def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_output(self):
        params = replace(GREEDY, repetition_penalty=1.5)
        assert self.changed(params, (0, 0, 3), (2,)) == pytest.approx([2.0 / 1.5, 1.9, 1.8 / 1.5, -1.5])

    def test_negative_penalties_reward(self):
        params = replace(GREEDY, presence_penalty=-1.0)
        assert self.changed(params, (0,), (2,)) == pytest.approx([2.0, 1.9, 2.8, -1.0])

    def test_a_greedy_penalised_row_changes_its_token_and_its_neighbour_does_not(self):
        params = replace(GREEDY, presence_penalty=2.0)
        assert draw(self.LOGITS, row(params, (0,), (0,)), row(GREEDY, (0,), (0,))) == [1, 0]


def test_logit_bias_forces_and_forbids():
    logits = random_logits(1, 1)
    best = int(logits.argmax())
    assert draw(logits, row(replace(GREEDY, logit_bias=((17, 100.0),)))) == [17]
    assert draw(logits, row(replace(GREEDY, logit_bias=((best, -100.0),)))) != [best]


def test_a47_ids_beyond_the_vocabulary_change_nothing_and_the_last_id_can_be_forced():
    params = replace(GREEDY, logit_bias=((50, 100.0), (99999999, -3.0)), stop_token_ids=(50, 3), min_tokens=9)
    penalised = replace(params, repetition_penalty=1.1, presence_penalty=0.1)
    logits = random_logits(2, 2)
    expected = logits.argmax(axis=-1).tolist()
    assert draw(logits, row(params), row(penalised, prompt=(60,), output=(70,))) == expected
    forced = replace(GREEDY, logit_bias=((49, 100.0),), num_logprobs=2)
    assert draw(random_logits(2, 1), row(forced)) == [49]


def test_end_tokens_wait_for_min_tokens_even_when_forced():
    params = replace(GREEDY, min_tokens=2, stop_token_ids=(4, 5), logit_bias=((4, 100.0), (5, 50.0)))
    logits = [0.0, 1.0, 0.5, 0.0, 0.0, 0.0]
    tokens = [draw(logits, row(params, output=(0,) * num_output))[0] for num_output in range(4)]
    assert tokens == [1, 1, 4, 4]


def test_a12_logprobs_are_those_of_the_raw_distribution_with_a_floor():
    logits = np.array([[3.0, 2.0, -np.inf, 1.0]], dtype=np.float32)
    params = replace(WARM, temperature=0.01, top_p=0.2, logit_bias=((0, -100.0),), presence_penalty=2.0, num_logprobs=4)
    (sampled,) = sample(logits.copy(), [row(params, output=(1,))])
    expected = [3.0, 2.0, 1.0] - np.log(np.exp([3.0, 2.0, 1.0]).sum())
    assert sampled.token_id in (1, 3)  # the bias moved the choice, not the log-probabilities
    assert [entry.token_id for entry in sampled.top_logprobs] == [0, 1, 3, 2]
    assert [entry.logprob for entry in sampled.top_logprobs] == pytest.approx([*expected, LOGPROB_FLOOR])
    assert sampled.logprob == pytest.approx(expected[sampled.token_id - (sampled.token_id == 3)])
    assert all(np.isfinite(entry.logprob) for entry in sampled.top_logprobs)


def test_logprobs_of_the_chosen_token_only_and_of_more_tokens_than_there_are():
    logits = random_logits(4, 2, vocab_size=5)
    chosen, many = sample(logits, [row(replace(GREEDY, num_logprobs=0)), row(replace(GREEDY, num_logprobs=20))])
    assert chosen.top_logprobs == ()
    assert chosen.logprob is not None
    assert len(many.top_logprobs) == 5
    assert many.top_logprobs[0].token_id == many.token_id


def test_a_row_without_logprobs_has_none():
    (sampled,) = sample(random_logits(4, 1), [row(GREEDY, sequence_id=12)])
    assert (sampled.sequence_id, sampled.logprob, sampled.top_logprobs) == (12, None, ())


def test_a10_a_huge_top_k_beside_a_greedy_row():
    logits = random_logits(6, 2)
    tokens = draw(logits, row(replace(WARM, top_k=8589934592)), row(GREEDY))
    assert tokens[1] == int(logits[1].argmax())
    assert tokens[0] == draw(logits[:1], row(WARM))[0]


def test_a_mask_leaves_only_what_it_allows_whatever_else_is_asked():
    allowed = np.packbits(np.isin(np.arange(48), [3, 17, 40]), bitorder="little").tobytes()  # ids 48, 49: not allowed
    free = SamplingParams(max_tokens=9, temperature=1.0, logit_bias=((9, 100.0), (49, 100.0)), repetition_penalty=1.5)
    logits = random_logits(3, 200)
    for params in (GREEDY, WARM, free, replace(free, top_k=5, top_p=0.3, min_p=0.2)):
        masked = [row(params, output=[5] * idx)._replace(allowed=allowed) for idx in range(200)]
        assert set(draw(logits, *masked)) <= {3, 17, 40}
    alone = draw(logits, *[row(WARM)] * 200)
    half = [row(WARM)._replace(allowed=allowed) if idx % 2 else row(WARM) for idx in range(200)]
    assert draw(logits, *half)[::2] == alone[::2]  # neighbours without a mask feel nothing
