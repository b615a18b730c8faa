"""A checked body and a prompt to the engine's request: defaults filled in, ids checked, lengths checked."""

from collections.abc import Iterable, Sequence

from crosspool.core import SamplingParams, TokenConstraint
from crosspool.engine.request import GenerationRequest
from crosspool.server.catalogue import ModelFrontend
from crosspool.server.errors import ContextRefusal, bad_request
from crosspool.server.protocol import GenerationBody


def generation_request(
    body: GenerationBody,
    model: ModelFrontend,
    prompt: Sequence[int],
    *,
    request_id: str,
    context_limit: int,
    constraint: TokenConstraint | None,
) -> GenerationRequest:
    """The engine's request for one prompt.

    Without max_tokens an answer may fill what the context leaves. Raises APIError (400): context_length_exceeded with
    all three numbers; a token id of logit_bias or stop_token_ids that the model has not.
    """
    check_ids(body.logit_bias, "logit_bias", model)
    check_ids(body.stop_token_ids, "stop_token_ids", model)
    max_tokens = _max_tokens(body, len(prompt), context_limit)
    defaults = model.defaults
    top_k = defaults.top_k if body.top_k is None else max(0, body.top_k)
    return GenerationRequest(
        request_id=request_id,
        model=model.name,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(body.min_tokens, max_tokens),
            temperature=defaults.temperature if body.temperature is None else body.temperature,
            top_p=defaults.top_p if body.top_p is None else body.top_p,
            top_k=min(top_k, model.vocab_size),  # a larger one keeps every token just the same
            min_p=defaults.min_p if body.min_p is None else body.min_p,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=(
                defaults.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty
            ),
            logit_bias=tuple(sorted(body.logit_bias.items())),
            stop_token_ids=tuple(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
            num_logprobs=body.num_logprobs,
        ),
        seed=body.wrapped_seed,
        n=body.n,
        stop=tuple(body.stop),
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        priority=body.priority,
        timeout_s=body.timeout,
        cache_salt=body.cache_salt,
        constraint=constraint,
    )


def check_ids(ids: Iterable[int], param: str, model: ModelFrontend) -> None:
    """Raises APIError (400) for the first id that the model has not."""
    for token_id in ids:
        if not 0 <= token_id < model.vocab_size:
            raise bad_request(
                f"{param} holds the token id {token_id}; ids of {model.name} lie between 0 and {model.vocab_size - 1}",
                param=param,
            )


def _max_tokens(body: GenerationBody, prompt_tokens: int, limit: int) -> int:
    asked = body.max_new_tokens
    if asked is None:
        asked = max(limit - prompt_tokens, body.min_tokens, 1)
    if prompt_tokens + asked > limit:
        raise ContextRefusal(
            f"the context limit is {limit} tokens; the prompt has {prompt_tokens} and {asked} output tokens are asked "
            f"for, {prompt_tokens + asked} together; shorten the prompt or lower max_tokens",
            param="max_tokens" if prompt_tokens < limit else body.prompt_field,
        )
    return asked
