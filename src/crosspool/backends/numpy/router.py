"""Which experts a token goes to, and with what weight; every rule of RouterSpec, in float32."""

import numpy as np
import numpy.typing as npt

from crosspool.backends.base import FloatArray
from crosspool.models.spec import RouterSpec

IntArray = npt.NDArray[np.int64]


def route(
    logits: FloatArray, spec: RouterSpec, top_k: int, choice_bias: FloatArray | None = None
) -> tuple[IntArray, FloatArray]:
    """Expert ids and weights, both (num_tokens, top_k), best choice first, from logits (num_tokens, num_experts).

    choice_bias: (num_experts,), joins the choice only. Equal scores: the lower expert id wins.
    """
    plain = choice_bias is None and spec.num_groups == 1
    if spec.score == "softmax_of_topk" or (spec.score == "softmax" and spec.renormalise and plain):
        # A softmax over all experts, renormalised over the chosen, is the softmax over the chosen.
        ids = top_ids(logits, top_k)
        weights = softmax(_at(logits, ids))
    else:
        scores = sigmoid(logits) if spec.score == "sigmoid" else softmax(logits)
        choice = scores if choice_bias is None else scores + choice_bias
        if spec.num_groups > 1:
            choice = _within_best_groups(choice, spec)
        ids = top_ids(choice, top_k)
        weights = _at(scores, ids)
        if spec.renormalise:
            total = np.add.reduce(weights, axis=-1, keepdims=True)
            if spec.renormalise_eps:
                total += np.float32(spec.renormalise_eps)
            weights /= total
    if spec.scale != 1.0:
        weights *= np.float32(spec.scale)
    return ids, weights


def top_ids(scores: FloatArray, top_k: int) -> IntArray:
    """(num_tokens, top_k) indices of the largest scores, largest first, equal ones by index."""
    return (-scores).argsort(axis=-1, kind="stable")[:, :top_k]


def softmax(x: FloatArray) -> FloatArray:
    """Over the last axis."""
    result: FloatArray = np.exp(x - np.maximum.reduce(x, axis=-1, keepdims=True))
    result /= np.add.reduce(result, axis=-1, keepdims=True)
    return result


def sigmoid(x: FloatArray) -> FloatArray:
    """Elementwise, without overflow."""
    small = np.exp(-np.abs(x))
    result: FloatArray = np.where(x >= 0, np.float32(1), small)
    result /= 1 + small
    return result


def _at(scores: FloatArray, ids: IntArray) -> FloatArray:
    """(num_tokens, top_k) scores of the chosen."""
    if len(scores) == 1:
        return scores.take(ids)
    return scores[np.arange(len(scores))[:, None], ids]


def _within_best_groups(choice: FloatArray, spec: RouterSpec) -> FloatArray:
    """`choice` with -inf for every expert outside its token's best groups."""
    num_tokens, num_experts = choice.shape
    groups = choice.reshape(num_tokens, spec.num_groups, -1)
    num_summed = 1 if spec.group_score == "max" else 2
    group_scores = np.sort(groups, axis=-1)[..., -num_summed:].sum(axis=-1)
    best = top_ids(group_scores, spec.topk_groups)
    open_groups = np.zeros((num_tokens, spec.num_groups, 1), dtype=bool)
    np.put_along_axis(open_groups[..., 0], best, True, axis=-1)
    return np.where(open_groups, groups, np.float32(-np.inf)).reshape(num_tokens, num_experts)
