"""Which experts a token goes to, and with what weight; every rule of RouterSpec, in float32.

Everything here works over the last axis: on (num_tokens, num_experts) as on one token's (num_experts,).
"""

from functools import cache

import numpy as np

from crosspool.backends.base import FloatArray, IntArray
from crosspool.models.spec import RouterSpec


def route(
    logits: FloatArray, spec: RouterSpec, top_k: int, choice_bias: FloatArray | None = None
) -> tuple[IntArray, FloatArray]:
    """Expert ids and weights, both (..., top_k), best choice first, from logits (..., num_experts).

    choice_bias: (num_experts,), joins the choice only. Equal scores: the lower expert id wins.
    """
    plain = choice_bias is None and spec.num_groups == 1
    if spec.score == "softmax_of_topk" or (spec.score == "softmax" and spec.renormalise and plain):
        # A softmax over all experts, renormalised over the chosen, is the softmax over the chosen.
        ids = top_ids(logits, top_k)
        weights = _at(logits, ids)
        weights -= weights[..., :1]  # the best one
        np.exp(weights, weights)
        weights /= _sum(weights)
    else:
        scores = sigmoid(logits) if spec.score == "sigmoid" else softmax(logits)
        choice = scores if choice_bias is None else scores + choice_bias
        if spec.num_groups > 1:
            choice = _within_best_groups(choice, spec)
        ids = top_ids(choice, top_k)
        weights = _at(scores, ids)
        if spec.renormalise:
            total = _sum(weights)
            if spec.renormalise_eps:
                total += np.float32(spec.renormalise_eps)
            weights /= total
    if spec.scale != 1.0:
        weights *= np.float32(spec.scale)
    return ids, weights


def top_ids(scores: FloatArray, top_k: int) -> IntArray:
    """(..., top_k) indices of the largest scores, largest first, equal ones by index."""
    return (-scores).argsort(axis=-1, kind="stable")[..., :top_k]


def softmax(x: FloatArray) -> FloatArray:
    """Over the last axis."""
    result: FloatArray = x - x.max(axis=-1, keepdims=True)
    np.exp(result, result)
    result /= _sum(result)
    return result


def sigmoid(x: FloatArray) -> FloatArray:
    """Elementwise, without overflow."""
    small = np.exp(-np.abs(x))
    result: FloatArray = np.where(x >= 0, np.float32(1), small)
    result /= 1 + small
    return result


def _sum(x: FloatArray) -> FloatArray:
    """(..., 1) sums over the last axis."""
    sums: FloatArray = x.dot(_ones(x.shape[-1]))
    return sums


@cache
def _ones(count: int) -> FloatArray:
    return np.ones((count, 1), dtype=np.float32)


def _at(scores: FloatArray, ids: IntArray) -> FloatArray:
    """(..., top_k) scores of the chosen, a new array."""
    if scores.ndim == 1:
        return scores[ids]
    return scores[np.arange(len(scores))[:, None], ids]


def _within_best_groups(choice: FloatArray, spec: RouterSpec) -> FloatArray:
    """`choice` with -inf for every expert outside its token's best groups."""
    groups = choice.reshape(*choice.shape[:-1], spec.num_groups, -1)
    num_summed = 1 if spec.group_score == "max" else 2
    group_scores = np.sort(groups, axis=-1)[..., -num_summed:].sum(axis=-1)
    best = top_ids(group_scores, spec.topk_groups)
    open_groups = np.zeros(groups.shape[:-1], dtype=bool)
    np.put_along_axis(open_groups, best, True, axis=-1)
    return np.where(open_groups[..., None], groups, np.float32(-np.inf)).reshape(choice.shape)
