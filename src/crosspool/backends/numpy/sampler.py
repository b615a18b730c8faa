"""Drawing the next token of each row from its logits.

Order: repetition penalty, frequency and presence penalties, logit bias, end tokens masked until `min_tokens`; then
either the largest logit (greedy), or temperature, min-p, top-k, top-p and one random number. Each cut looks at what
the cuts before it left. Log-probabilities are those of the untouched logits.

Every cut keeps a prefix of the ranking by logit, equal logits by token id, so greedy is the same as `top_k=1`. The
token is the first, in id order, whose cumulative probability over the kept tokens exceeds the row's random number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from crosspool.backends.base import FloatArray
from crosspool.backends.numpy.philox import UniformStream
from crosspool.core import SampledToken, SamplingParams, TokenLogprob

Float64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

LOGPROB_FLOOR = -9999.0


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one row's token depends on beside its logits.

    token_ids: prompt, then output; the first `num_prompt_tokens` are the prompt. position: of the token to draw; what
    `token_ids` holds from there on (when a step is replayed) plays no part. Ids at or above the vocabulary size, here
    and in `params`, have no logit and change nothing.
    """

    sequence_id: int
    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int
    position: int
    uniform: UniformStream

    @property
    def num_output_tokens(self) -> int:
        return self.position - self.num_prompt_tokens


def sample(logits: FloatArray, rows: Sequence[SamplingRow]) -> tuple[SampledToken, ...]:
    """One token per row. logits: (rows, vocabulary) float32; overwritten where a row has penalties or bias."""
    raw = {idx: logits[idx].copy() for idx, row in enumerate(rows) if row.params.num_logprobs is not None}
    for idx, row in enumerate(rows):
        if _changes_logits(row):
            _change(logits[idx], row)
    chosen: list[int] = logits.argmax(axis=-1).tolist()
    drawn = [idx for idx, row in enumerate(rows) if not row.params.is_greedy]
    if drawn:
        tokens = _draw(logits[drawn] if len(drawn) < len(rows) else logits, [rows[idx] for idx in drawn])
        for idx, token in zip(drawn, tokens, strict=True):
            chosen[idx] = token
    return tuple(_result(row, token, raw.get(idx)) for idx, (row, token) in enumerate(zip(rows, chosen, strict=True)))


def _changes_logits(row: SamplingRow) -> bool:
    params = row.params
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or bool(params.logit_bias)
        or row.num_output_tokens < params.min_tokens
    )


def _change(logits: FloatArray, row: SamplingRow) -> None:
    """Penalties, bias and the mask of end tokens, on one row's logits in place."""
    params, vocab_size = row.params, len(logits)
    tokens = np.array(row.token_ids[: row.position], dtype=np.int64)
    if params.repetition_penalty != 1.0:
        seen = np.unique(tokens[tokens < vocab_size])
        values = logits[seen]
        penalty = np.float32(params.repetition_penalty)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        output = tokens[row.num_prompt_tokens :]
        generated, counts = np.unique(output[output < vocab_size], return_counts=True)
        penalties = params.presence_penalty + params.frequency_penalty * counts
        logits[generated] -= penalties.astype(np.float32)
    for token, bias in params.logit_bias:
        if 0 <= token < vocab_size:
            logits[token] += np.float32(bias)
    if row.num_output_tokens < params.min_tokens:
        logits[[token for token in params.stop_token_ids if 0 <= token < vocab_size]] = -np.inf


def _draw(logits: FloatArray, rows: Sequence[SamplingRow]) -> list[int]:
    """One random token per row, from logits (rows, vocabulary) that are not all -inf."""
    temperatures = np.array([[row.params.temperature] for row in rows])
    weights = logits.astype(np.float64)
    weights -= weights.max(axis=-1, keepdims=True)
    weights /= temperatures
    np.exp(weights, out=weights)  # unnormalised probabilities; the best token has weight 1
    cut = [idx for idx, row in enumerate(rows) if row.params.top_k or row.params.top_p < 1 or row.params.min_p > 0]
    if cut:
        weights[cut] = _cut(weights[cut], [rows[idx].params for idx in cut])
    cumulative = np.cumsum(weights, axis=-1)
    uniform = np.array([row.uniform.at(row.position) for row in rows])
    targets = uniform * cumulative[:, -1]
    tokens: list[int] = (cumulative > targets[:, None]).argmax(axis=-1).tolist()
    return tokens


def _cut(weights: Float64Array, params: Sequence[SamplingParams]) -> Float64Array:
    """`weights` (rows, vocabulary) with zeros for tokens outside min-p, top-k and top-p."""
    vocab_size = weights.shape[1]
    ranked = np.sort(weights, axis=-1)[:, ::-1]
    num_kept = np.count_nonzero(ranked >= np.array([[item.min_p] for item in params]), axis=-1)
    top_k = np.array([min(item.top_k, vocab_size) or vocab_size for item in params])
    num_kept = np.minimum(num_kept, top_k)
    mass = np.cumsum(ranked, axis=-1)
    kept_mass = np.take_along_axis(mass, num_kept[:, None] - 1, axis=-1)
    wanted = np.array([[item.top_p] for item in params]) * kept_mass
    # A token stays while the mass before it is below what is wanted; the first always stays.
    num_wanted = 1 + np.count_nonzero(mass[:, :-1] < wanted, axis=-1)
    num_kept = np.minimum(num_kept, num_wanted)
    least = np.take_along_axis(ranked, num_kept[:, None] - 1, axis=-1)
    kept = weights >= least
    for idx in np.flatnonzero(np.count_nonzero(kept, axis=-1) > num_kept).tolist():
        equal = np.flatnonzero(weights[idx] == least[idx])
        num_above = np.count_nonzero(weights[idx] > least[idx])
        kept[idx, equal[num_kept[idx] - num_above :]] = False
    return np.where(kept, weights, 0.0)


def _result(row: SamplingRow, token: int, raw: FloatArray | None) -> SampledToken:
    if raw is None:
        return SampledToken(row.sequence_id, token)
    logprobs = log_softmax(raw)
    top = _top(logprobs, row.params.num_logprobs or 0)
    return SampledToken(
        row.sequence_id,
        token,
        float(logprobs[token]),
        tuple(TokenLogprob(token_id, float(logprobs[token_id])) for token_id in top),
    )


def log_softmax(logits: FloatArray) -> Float64Array:
    """(vocabulary,) log-probabilities in float64, floored at -9999."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    shifted -= np.log(np.exp(shifted).sum())
    return np.maximum(shifted, LOGPROB_FLOOR)


def _top(logprobs: Float64Array, count: int) -> list[int]:
    """Ids of the `count` largest, largest first, equal ones by id."""
    if count == 0:
        return []
    count = min(count, len(logprobs))
    least = np.partition(logprobs, len(logprobs) - count)[len(logprobs) - count]
    candidates = np.flatnonzero(logprobs >= least)
    top: list[int] = candidates[(-logprobs[candidates]).argsort(kind="stable")][:count].tolist()
    return top
