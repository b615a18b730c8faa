"""Drawing the next token of each row from its logits.

Order: tokens that are not allowed masked, repetition penalty, frequency and presence penalties, logit bias, end tokens
masked until `min_tokens`; then either the largest logit (greedy), or temperature, min-p, top-k, top-p and one random
number. Each cut looks at what the cuts before it left. Log-probabilities are those of the untouched logits.

Every cut keeps a prefix of the ranking by logit, equal logits by token id, so greedy is the same as `top_k=1`. The
token is the first, in id order, whose cumulative probability over the kept tokens exceeds the row's random number.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crosspool.backends.base import FloatArray, IntArray
from crosspool.backends.sequences.philox import UniformStream
from crosspool.core import SampledToken, SamplingParams, TokenLogprob

Float64Array = npt.NDArray[np.float64]

LOGPROB_FLOOR = -9999.0


class SamplingRow(NamedTuple):
    """What one row's token depends on beside its logits.

    token_ids: prompt, then output; the first `num_prompt_tokens` are the prompt. position: of the token to draw; what
    `token_ids` holds from there on (when a step is replayed) plays no part. Ids at or above the vocabulary size, here
    and in `params`, have no logit and change nothing. allowed: as in `StepRow`.
    """

    sequence_id: int
    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int
    position: int
    uniform: UniformStream
    allowed: bytes | None = None

    @property
    def num_output_tokens(self) -> int:
        return self.position - self.num_prompt_tokens


def sample(logits: FloatArray, rows: Sequence[SamplingRow]) -> tuple[SampledToken, ...]:
    """One token per row. logits: (rows, vocabulary) float32; overwritten where a row has a mask, penalties or bias."""
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
    return row.allowed is not None or params.changes_logits or row.num_output_tokens < params.min_tokens


def _change(logits: FloatArray, row: SamplingRow) -> None:
    """Masks, penalties and bias, on one row's logits in place."""
    params, vocab_size = row.params, len(logits)
    if row.allowed is not None:
        _mask(logits, row.allowed)
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


def _mask(logits: FloatArray, allowed: bytes) -> None:
    """Minus infinity for every id whose bit is not set."""
    bits = np.unpackbits(np.frombuffer(allowed, dtype=np.uint8), bitorder="little")[: len(logits)]
    logits[: len(bits)][bits == 0] = -np.inf
    logits[len(bits) :] = -np.inf


def _draw(logits: FloatArray, rows: Sequence[SamplingRow]) -> list[int]:
    """One random token per row, from logits (rows, vocabulary); the largest where they are no distribution."""
    with np.errstate(invalid="ignore"):
        weights = logits.astype(np.float64)
        weights -= weights.max(axis=-1, keepdims=True)
        weights /= np.array([[row.params.temperature] for row in rows])
        np.exp(weights, out=weights)  # unnormalised probabilities; the best token has weight 1
    tokens = []
    for idx, (own, row) in enumerate(zip(weights, rows, strict=True)):
        if np.isnan(own.sum()):  # infinite or not a number: a broken model must not end its neighbours' step
            tokens.append(int(logits[idx].argmax()))
            continue
        kept = _kept(own, row.params)
        cumulative = np.cumsum(own if kept is None else own[kept])
        target = row.uniform.at(row.position) * cumulative[-1]
        place = int(cumulative.searchsorted(target, side="right"))
        tokens.append(place if kept is None else int(kept[place]))
    return tokens


def _kept(weights: Float64Array, params: SamplingParams) -> IntArray | None:
    """Ids, ascending, that min-p, top-k and top-p leave of one row's weights (vocabulary,); None: all."""
    if not (params.min_p > 0 or 0 < params.top_k < len(weights) or params.top_p < 1):
        return None
    kept: IntArray = np.flatnonzero(weights >= min(params.min_p, 1.0)) if params.min_p > 0 else np.flatnonzero(weights)
    if 0 < params.top_k < len(kept):
        kept = kept[_largest(weights[kept], params.top_k)]
    if params.top_p < 1:
        own = weights[kept]
        wanted = params.top_p * own.sum()
        # Tokens far below the mean of what may be lost are lost, all of them together; sorting the others is quick.
        candidates = own >= 0.5 * (1 - params.top_p) * own.sum() / len(own)
        kept, own = kept[candidates], own[candidates]
        mass = np.cumsum(np.sort(own)[::-1])
        # A token stays while the mass before it is below what is wanted; the first always stays.
        kept = kept[_largest(own, 1 + int(np.count_nonzero(mass[:-1] < wanted)))]
    return kept


def _largest(weights: Float64Array, count: int) -> IntArray:
    """Indices, ascending, of the `count` largest weights, equal ones by index."""
    least = np.partition(weights, len(weights) - count)[len(weights) - count]
    chosen = np.flatnonzero(weights >= least)
    surplus = len(chosen) - count
    if surplus:
        equal = np.flatnonzero(weights[chosen] == least)
        chosen = np.delete(chosen, equal[len(equal) - surplus :])
    return chosen


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
    """(vocabulary,) log-probabilities in float64, floored at -9999; what is not a number too."""
    shifted = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        shifted -= shifted.max()
        shifted -= np.log(np.exp(shifted).sum())
    return np.fmax(shifted, LOGPROB_FLOOR)


def _top(logprobs: Float64Array, count: int) -> list[int]:
    """Ids of the `count` largest, largest first, equal ones by id."""
    if count == 0:
        return []
    count = min(count, len(logprobs))
    candidates = _largest(logprobs, count)
    top: list[int] = candidates[(-logprobs[candidates]).argsort(kind="stable")].tolist()
    return top
