"""Every routing rule by hand, and all of them against a plain loop. Wrong ports fail here first."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosspool.backends.numpy.router import route, sigmoid
from crosspool.models.spec import RouterSpec

SOFTMAX = RouterSpec(score="softmax")


def routed(logits, spec, top_k, choice_bias=None):
    bias = None if choice_bias is None else np.array(choice_bias, dtype=np.float32)
    ids, weights = route(np.array([logits], dtype=np.float32), spec, top_k, bias)
    assert weights.dtype == np.float32
    one_ids, one_weights = route(np.array(logits, dtype=np.float32), spec, top_k, bias)
    assert one_ids.tolist() == ids[0].tolist()
    assert one_weights == pytest.approx(weights[0], rel=1e-6)
    return ids[0].tolist(), weights[0].tolist()


def test_a25_bias_chooses_and_the_unbiased_score_weighs():
    spec = RouterSpec(score="sigmoid", choice_bias=True, renormalise=True, renormalise_eps=1e-20, scale=2.5)
    ids, weights = routed([0.3, -1.2, 1.6, 0.5], spec, 2, [0, 4, 0, 0])
    assert ids == [1, 2]
    assert weights == pytest.approx([0.5441, 1.9559], abs=1e-4)


@pytest.mark.parametrize(("renormalise", "expected"), [(False, [0.6896, 0.1880]), (True, [0.7858, 0.2142])])
def test_a25_softmax_with_and_without_renormalising(renormalise, expected):
    ids, weights = routed([2.2, 0.9, 0.1, -0.7], RouterSpec(score="softmax", renormalise=renormalise), 2)
    assert ids == [0, 1]
    assert weights == pytest.approx(expected, abs=1e-4)


def test_gpt_oss_takes_a_softmax_over_the_chosen_logits():
    ids, weights = routed([1.0, 3.0, 2.0, -5.0], RouterSpec(score="softmax_of_topk"), 2)
    assert ids == [1, 2]
    assert weights == pytest.approx([1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))], rel=1e-6)


def test_deepseek_v3_opens_the_groups_with_the_best_two_experts_together():
    # Group sums of two best: 1.5, 1.7, 1.2, 0.2: groups 0 and 1 are open; expert 4 (0.9) has a closed group.
    choice = np.array([0.8, 0.7, 0.85, 0.85, 0.9, 0.3, 0.1, 0.1])
    logits = np.log(choice / (1 - choice))
    spec = RouterSpec(score="sigmoid", num_groups=4, topk_groups=2, renormalise=True, scale=2.5)
    ids, weights = routed(logits, spec, 3)
    assert set(ids) == {2, 3, 0}
    assert sum(weights) == pytest.approx(2.5)


def test_deepseek_v2_groups_by_their_best_expert():
    logits = [3.0, 0.0, 2.0, 2.0, 2.5, -9.0, 0.0, 0.0]
    spec = RouterSpec(score="softmax", num_groups=4, topk_groups=2, group_score="max")
    assert routed(logits, spec, 2)[0] == [0, 4]


def test_experts_of_closed_groups_lose_to_negative_scores():
    spec = RouterSpec(score="sigmoid", choice_bias=True, num_groups=2, topk_groups=1)
    ids, _ = routed([1.0, 1.0, 0.0, 0.0], spec, 2, [-3.0, -3.0, -9.0, -9.0])
    assert set(ids) == {0, 1}


def test_equal_scores_go_to_the_lower_expert():
    assert routed([1.0] * 8, SOFTMAX, 3)[0] == [0, 1, 2]


def test_scale_multiplies_unnormalised_weights_too():
    _, plain = routed([2.0, 1.0, 0.0], SOFTMAX, 2)
    _, scaled = routed([2.0, 1.0, 0.0], RouterSpec(score="softmax", scale=16.0), 2)
    assert scaled == pytest.approx([16 * weight for weight in plain])


def test_sigmoid_of_large_numbers_does_not_overflow():
    with np.errstate(all="raise", under="ignore"):
        assert sigmoid(np.array([-200.0, 0.0, 200.0], dtype=np.float32)).tolist() == pytest.approx([0.0, 0.5, 1.0])


def plain_route(logits, spec, top_k, bias):
    """The rules of RouterSpec's docstring, for one token, in float64."""
    logits = logits.astype(np.float64)
    exp = np.exp(logits - logits.max())
    scores = {"softmax": exp / exp.sum(), "sigmoid": 1 / (1 + np.exp(-logits)), "softmax_of_topk": logits}[spec.score]
    choice = scores + (0 if bias is None else bias)
    size = len(logits) // spec.num_groups
    by_group = [sorted(choice[start : start + size], reverse=True) for start in range(0, len(logits), size)]
    values = [group[0] if spec.group_score == "max" else sum(group[:2]) for group in by_group]
    best = sorted(range(spec.num_groups), key=lambda group: -values[group])[: spec.topk_groups]
    allowed = [expert for expert in range(len(logits)) if expert // size in best]
    ids = sorted(allowed, key=lambda expert: -choice[expert])[:top_k]
    weights = scores[ids]
    if spec.score == "softmax_of_topk":
        weights = np.exp(weights - weights.max())
        weights /= weights.sum()
    if spec.renormalise:
        weights = weights / (weights.sum() + spec.renormalise_eps)
    return ids, weights * spec.scale


@pytest.mark.fuzz
@given(
    seed=st.integers(0, 2**32),
    score=st.sampled_from(["softmax", "sigmoid", "softmax_of_topk"]),
    biased=st.booleans(),
    groups=st.sampled_from([(1, 1), (4, 2), (2, 1)]),
    group_score=st.sampled_from(["max", "top2_sum"]),
    renormalise=st.booleans(),
    num_tokens=st.sampled_from([1, 5]),
)
def test_all_rules_equal_the_plain_loop(seed, score, biased, groups, group_score, renormalise, num_tokens):
    rng = np.random.default_rng(seed)
    if score == "softmax_of_topk":
        biased, groups, renormalise = False, (1, 1), False
    spec = RouterSpec(
        score=score,
        choice_bias=biased,
        num_groups=groups[0],
        topk_groups=groups[1],
        group_score=group_score,
        renormalise=renormalise,
        renormalise_eps=1e-20,
        scale=1.8,
    )
    logits = rng.standard_normal((num_tokens, 16)).astype(np.float32) * 2
    bias = rng.standard_normal(16).astype(np.float32) * 0.3 if biased else None
    ids, weights = route(logits, spec, 4, bias)
    for token in range(num_tokens):
        expected_ids, expected_weights = plain_route(logits[token], spec, 4, bias)
        assert ids[token].tolist() == expected_ids
        assert weights[token] == pytest.approx(expected_weights, rel=1e-5)
