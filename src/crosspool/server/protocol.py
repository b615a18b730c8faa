"""Request bodies of the OpenAI API, every bound checked: a wrong value is a 400 that names the field and its limit.

null means absent. Fields this server does not know are accepted and logged; fields it does not offer, or offers on
another route or under another name, and fields that contradict each other, are refused: all by `refusals.py`.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from crosspool.server.messages import Messages

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1000
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_PROMPTS = 256
MAX_TIMEOUT_S = 86_400
MAX_CACHE_SALT = 256
SEED_RANGE = 2**63

SYSTEM = "a message of role system"
OTHER_NAMES: Mapping[str, str] = {"max_output_tokens": "max_tokens", "stop_sequences": "stop"}


def _stop_strings(value: Any) -> list[str]:
    """`stop` as a list: at most MAX_STOP_STRINGS strings of 1 to MAX_STOP_CHARACTERS characters."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or any(not isinstance(item, str) for item in strings):
        raise ValueError("must be a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"has {len(strings)} strings; at most {MAX_STOP_STRINGS} are taken")
    for item in strings:
        if not item:
            raise ValueError("holds an empty string, which would match at once; leave it out")
        if len(item) > MAX_STOP_CHARACTERS:
            raise ValueError(f"holds a string of {len(item)} characters; at most {MAX_STOP_CHARACTERS} are taken")
    return strings


def _logit_bias(value: Any) -> dict[int, float]:
    """Token id to bias within [-100, 100]. JSON keys are strings, so ids arrive as such."""
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids to numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(value)} entries; at most {MAX_LOGIT_BIAS} are taken")
    bias: dict[int, float] = {}
    for key, number in value.items():
        if not (isinstance(key, int) or (key.isascii() and key.isdigit() and len(key) <= 19)):
            raise ValueError(f"has the key {str(key)[:40]!r}; keys are token ids of 0 or more")
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise ValueError(f"of token {int(key)} must be a number between -100 and 100")
        if not -100 <= number <= 100:
            raise ValueError(f"of token {int(key)} must lie between -100 and 100")
        bias[int(key)] = float(number)
    return bias


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """`prompt` as a list of texts or of token id lists: a string, strings, ids, or lists of ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not value:
        raise ValueError("is an empty list; send at least one prompt")
    if _are_ids(value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"has {len(value)} prompts; at most {MAX_PROMPTS} are taken")
    if all(isinstance(item, str) for item in value):
        return value
    if all(isinstance(item, list) and (not item or _are_ids(item)) for item in value):
        return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")


def _are_ids(values: list[Any]) -> bool:
    """Whether all are whole numbers. A prompt may hold millions, so that it is not looked at one by one."""
    return set(map(type, values)) == {int}


Stop = Annotated[
    list[str],
    BeforeValidator(_stop_strings),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 16}]}),
]
LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_logit_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]
Prompts = Annotated[
    list[str] | list[list[int]],
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT)]


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


Number = Annotated[float, Field(strict=True), AfterValidator(_finite)]


class StreamOptions(BaseModel):
    """`stream_options`: include_usage asks for one last chunk with the totals."""

    model_config = ConfigDict(extra="allow")

    include_usage: Flag = False

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return _without_nulls(data)


class RequestBody(BaseModel):
    """Every body: fields nobody declares are kept for `refusals.py`; null is as good as absent, as SDKs send it.

    No string anywhere may hold half of a surrogate pair.
    """

    model_config = ConfigDict(extra="allow")

    other_names: ClassVar[Mapping[str, str]] = {}
    """Fields of other bodies here, and which of this one has their meaning."""

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, data: Any) -> Any:
        for key, value in data.items() if isinstance(data, dict) else ():
            if has_lone_surrogate([key, value]):
                raise PydanticCustomError(
                    "lone_surrogate",
                    "holds half of a surrogate pair; send whole characters",
                    {"field": key.encode("utf-8", "replace").decode()},
                )
        return _without_nulls(data)


class GenerationBody(RequestBody):
    """What both endpoints share: which model, how to sample, when to stop, how to answer."""

    model: str | None = Field(None, description="a served name or alias; may be left out where one model is served")
    max_tokens: Count | None = Field(None, description="tokens to generate at most; default: what the context leaves")
    min_tokens: Annotated[int, Field(strict=True, ge=0)] = 0
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = Field(None, description="0: greedy")
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1)] | None = Field(None, description="0 or -1: off")
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[Number, Field(gt=0, le=10)] | None = None
    logit_bias: LogitBias = {}
    seed: Annotated[int, Field(strict=True, ge=-SEED_RANGE, lt=SEED_RANGE)] | None = Field(
        None, description="the same seed gives the same answer; a negative one counts as seed + 2**63"
    )
    n: Annotated[int, Field(strict=True, ge=1, le=MAX_CHOICES)] = 1
    stop: Stop = []
    stop_token_ids: Annotated[list[Annotated[int, Field(strict=True, ge=0)]], Field(max_length=MAX_STOP_TOKEN_IDS)] = []
    include_stop_str_in_output: Flag = False
    skip_special_tokens: Flag = True
    ignore_eos: Flag = False
    priority: Annotated[int, Field(strict=True, ge=-1000, le=1000)] = Field(0, description="smaller is sooner")
    response_format: dict[str, Any] | None = Field(None, description="text, json_object or json_schema")
    structured_outputs: dict[str, Any] | None = Field(
        None, description="one of json, json_object, regex, choice, grammar (Lark)"
    )
    stream: Flag = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: CacheSalt | None = Field(
        None, description="cached prefixes are shared with requests of the same salt only; without one, of none"
    )
    timeout: Annotated[Number, Field(gt=0, le=MAX_TIMEOUT_S)] | None = Field(
        None, description="longest time in the queue in seconds, as the header X-Request-Timeout; then 408"
    )

    @property
    def prompt_field(self) -> str:
        """The field that holds the prompt."""
        raise NotImplementedError

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report beside each token's log-probability; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def max_new_tokens(self) -> int | None:
        """Output tokens asked for, under whichever name."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wrapped_seed(self) -> int | None:
        """The seed as the engine takes it, 0 or more."""
        return None if self.seed is None else self.seed % SEED_RANGE


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    other_names = {"max_completion_tokens": "max_tokens", **OTHER_NAMES}

    prompt: Prompts
    logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: Flag = Field(True, description="let the tokenizer add its begin token")
    echo: Flag = False
    best_of: Count | None = None
    suffix: str | None = None

    @property
    def prompt_field(self) -> str:
        return "prompt"

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    other_names = {"instructions": SYSTEM, "system": SYSTEM, **OTHER_NAMES}

    messages: Messages
    max_completion_tokens: Count | None = Field(None, description="the newer name of max_tokens; wins over it")
    logprobs: Flag = False
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] = Field({}, description="variables for the model's chat template")
    add_generation_prompt: Flag = True
    tools: list[Any] = []
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: Flag | None = Field(None, description="false: at most one call, where calls are forced")
    include_reasoning: Flag = Field(True, description="false: reasoning is generated and left out")
    reasoning_effort: str | None = Field(None, description="handed to the chat template")

    @property
    def prompt_field(self) -> str:
        return "messages"

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


def _without_nulls(data: Any) -> Any:
    return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


def has_lone_surrogate(value: Any) -> bool:
    """Whether a string in `value` holds half of a surrogate pair, as left by cutting text within an emoji."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(item)
            pending.extend(item.values())
        elif isinstance(item, list):
            if not _are_ids(item):
                pending.extend(item)
        elif isinstance(item, str) and not item.isascii():
            try:
                item.encode("utf-8")
            except UnicodeEncodeError:
                return True
    return False
