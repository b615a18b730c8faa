"""What a caller hands the engine: one GenerationRequest, tokenized, with its stop strings."""

from dataclasses import dataclass

from crosspool.core import SamplingParams, TokenConstraint

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """`n` sequences to generate from one prompt.

    sampling: `seed` in it is ignored; `stop_token_ids` are the caller's, to which the engine adds the model's end
    tokens unless `ignore_eos`. seed: None draws one; sequence i of n samples from a seed derived from (seed, i).
    timeout_s: longest time in the queue, after which the request ends with DeadlineExceededError at no prefill cost.
    priority: smaller is sooner; a step of one counts as one second of arrival, up to an hour.
    constraint: in its first state; every sequence gets a fork of it.
    Raises ValueError for bad bounds and stop strings; ids are checked against the vocabulary at `generate`.
    """

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    timeout_s: float | None = None
    key: str = ""  # whose it is, in any words: keys take turns in a model's queue
    cache_salt: str | None = None  # cached prefixes are shared with requests of the same salt only
    constraint: TokenConstraint | None = None

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n is {self.n}; it must be at least 1")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed is {self.seed}; it must lie between 0 and {MAX_SEED}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s is {self.timeout_s}; it must be above 0")
        if not self.prompt_token_ids:
            raise ValueError("the prompt has no tokens; send at least one")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are taken")
        for text in self.stop:
            if not text:
                raise ValueError("stop holds an empty string, which would match at once; leave it out")
            if len(text) > MAX_STOP_CHARACTERS:
                raise ValueError(f"a stop string has {len(text)} characters; at most {MAX_STOP_CHARACTERS} are taken")
