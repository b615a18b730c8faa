"""From one GenerationRequest to its n sequences and their detokenizers."""

import hashlib
from dataclasses import replace

from crosspool.core import Request
from crosspool.engine.detokenizer import Detokenizer
from crosspool.engine.request import GenerationRequest
from crosspool.engine.served_model import ServedModel


def sequence_seed(seed: int, index: int) -> int:
    """Seed of sequence `index` of a request: below 2**63, and the request's own for the first one.

    So n does not change the first answer, and the others differ from it and from each other.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sequences(
    request: GenerationRequest, model: ServedModel, *, seed: int, arrival_s: float, deadline_s: float | None
) -> list[Request]:
    """The request's sequences; end tokens are the caller's and, unless `ignore_eos`, the model's."""
    ends = () if request.sampling.ignore_eos else model.spec.eos_token_ids
    stop_token_ids = tuple(dict.fromkeys((*request.sampling.stop_token_ids, *ends)))
    return [
        Request(
            request_id=request.request_id,
            model=request.model,
            prompt_token_ids=list(request.prompt_token_ids),
            sampling=replace(request.sampling, seed=sequence_seed(seed, index), stop_token_ids=stop_token_ids),
            priority=request.priority,
            key=request.key,
            arrival_s=arrival_s,
            deadline_s=deadline_s,
            cache_salt=request.cache_salt,
            constraint=None if request.constraint is None else request.constraint.fork(),
            has_stop_strings=bool(request.stop),
        )
        for index in range(request.n)
    ]


def detokenizer(request: GenerationRequest, model: ServedModel) -> Detokenizer | None:
    """A fresh one for one sequence; None for a model without a tokenizer."""
    if model.tokenizer is None:
        return None
    return Detokenizer(
        model.tokenizer,
        stop=request.stop,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        min_tokens=request.sampling.min_tokens,
    )


def check_ids(request: GenerationRequest, vocab_size: int) -> None:
    """Raises ValueError for the first id outside the vocabulary: it would fail in the middle of a step."""
    for what, ids in (
        ("the prompt", request.prompt_token_ids),
        ("logit_bias", [token_id for token_id, _ in request.sampling.logit_bias]),
        ("stop_token_ids", request.sampling.stop_token_ids),
    ):
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"{what} has token id {token_id}; {request.model} has ids 0 to {vocab_size - 1}")
