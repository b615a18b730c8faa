"""The served models as requests see them: names, tokenizer, template, sampling defaults."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from crosspool.models.directory import GenerationDefaults
from crosspool.server.chat import ChatTemplate
from crosspool.server.errors import APIError, bad_request, shorten
from crosspool.server.grammar import GrammarVocabulary
from crosspool.server.tokenizer import TextTokenizer

MAX_LISTED_NAMES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingDefaults:
    """What a request that leaves a field out gets: the model's generation_config.json, else these."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, given: GenerationDefaults) -> "SamplingDefaults":
        """The model's own values where it gives some. `do_sample` is not looked at: greedy is temperature 0."""
        values = {name: getattr(given, name) for name in cls.__slots__}
        return cls(**{name: value for name, value in values.items() if value is not None})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFrontend:
    """One model's way from text to ids and back. The engine knows it by `name`.

    eos_token_ids: the model's end tokens, the only ones where an answer in a grammar is complete.
    """

    name: str
    vocab_size: int
    tokenizer: TextTokenizer
    template: ChatTemplate | None = None
    defaults: SamplingDefaults = SamplingDefaults()
    aliases: tuple[str, ...] = ()
    source: str = ""
    eos_token_ids: tuple[int, ...] = ()
    vocabulary: GrammarVocabulary = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        size = max(self.vocab_size, self.tokenizer.size)
        object.__setattr__(self, "vocabulary", GrammarVocabulary(self.tokenizer.serialized, size, self.eos_token_ids))


class Catalogue:
    """Names to models. Names are exact: another case, a path or a typo is not found, never guessed."""

    def __init__(self, frontends: Iterable[ModelFrontend]) -> None:
        self._by_name = {frontend.name: frontend for frontend in frontends}
        self._aliases = {alias: item for item in self._by_name.values() for alias in item.aliases}

    def __iter__(self) -> Iterator[ModelFrontend]:
        return iter(list(self._by_name.values()))

    def __contains__(self, name: str) -> bool:
        """Whether a model or an alias has that name."""
        return name in self._by_name or name in self._aliases

    def add(self, frontend: ModelFrontend) -> None:
        """Serve one model more. Its names must be free."""
        assert not any(name in self for name in (frontend.name, *frontend.aliases)), f"{frontend.name} is taken"
        self._by_name[frontend.name] = frontend
        self._aliases |= dict.fromkeys(frontend.aliases, frontend)

    def remove(self, name: str) -> None:
        """Forget a model and its aliases, if it is there."""
        frontend = self._by_name.pop(name, None)
        for alias in frontend.aliases if frontend is not None else ():
            self._aliases.pop(alias, None)  # one may be listed twice

    def resolve(self, name: str | None) -> ModelFrontend:
        """The model called `name`; with just one model served, also for no name at all.

        Raises APIError: 404 model_not_found for a name nobody has, 400 for none among several models.
        """
        if name is None:
            if len(self._by_name) == 1:
                return next(iter(self._by_name.values()))
            raise bad_request(
                f"model is missing; the served models are {self._names()}",
                param="model",
                code="missing_required_parameter",
            )
        found = self._by_name.get(name) or self._aliases.get(name)
        if found is None:
            raise APIError(
                404,
                f"the model {shorten(name, 100)!r} is not served here; the served models are {self._names()}",
                param="model",
                code="model_not_found",
            )
        return found

    def _names(self) -> str:
        names = sorted(self._by_name)
        more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
        return ", ".join(names[:MAX_LISTED_NAMES]) + more if names else "none"
