"""What tokens of a request take in frames, and requests that can never fit: refused with the true numbers."""

from crosspool.engine.served_model import ServedModel
from crosspool.errors import CapacityError, ContextLengthError
from crosspool.units import ceil_div


def capacity_tokens(model: ServedModel, num_frames: int) -> int:
    """Tokens one sequence of the model can hold when it has all `num_frames` frames of the pool."""
    return num_frames // model.frames_per_page * model.page_tokens


def context_limit(model: ServedModel, num_frames: int) -> int:
    """Prompt plus output tokens a request may ask for. Never above what the pool can hold for one.

    Raises CapacityError if the pool cannot hold one page of the model.
    """
    capacity = capacity_tokens(model, num_frames)
    if capacity < 2:
        raise CapacityError(
            f"a page of {model.name} takes {model.frames_per_page} frames and KV rank {model.kv_rank} has {num_frames}"
            f"; set kv_budget_bytes to {(model.frames_per_page + 1) * model.frame_bytes} or more"
        )
    return min(model.model_limit, capacity)


def check_length(model: ServedModel, num_frames: int, num_prompt_tokens: int, max_tokens: int) -> None:
    """Raises ContextLengthError or CapacityError, with the true numbers, for what can never fit."""
    total = num_prompt_tokens + max_tokens
    asked = f"{num_prompt_tokens} prompt tokens + {max_tokens} output tokens = {total}"
    if total > model.model_limit:
        raise ContextLengthError(
            f"{asked}, but the context limit of {model.name} is {model.model_limit} tokens; "
            + _remedy(model.model_limit, num_prompt_tokens)
        )
    capacity = capacity_tokens(model, num_frames)
    if total > capacity:
        raise CapacityError(
            f"{asked}, but the KV pool holds {capacity} tokens of one sequence of {model.name}; "
            + _remedy(capacity, num_prompt_tokens)
        )


def _remedy(limit: int, num_prompt_tokens: int) -> str:
    if num_prompt_tokens < limit:
        return f"ask for at most {limit - num_prompt_tokens} output tokens or shorten the prompt"
    return f"shorten the prompt to {limit - 1} tokens or fewer"


def frames_for(model: ServedModel, num_tokens: int) -> int:
    """Frames of the pages that hold `num_tokens` tokens."""
    return ceil_div(num_tokens, model.page_tokens) * model.frames_per_page
