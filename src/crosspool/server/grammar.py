"""Grammars on the `llguidance` library: a model's vocabulary, and the state of one answer in a grammar.

Compiling is bounded by the library's own fuel, counted in steps rather than seconds, and takes place in a thread. The
engine knows what is here as `core.TokenConstraint` alone.
"""

import threading
from collections import OrderedDict
from typing import Self

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from crosspool.errors import ConstraintError

MAX_CACHED_GRAMMARS = 64

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_grammar_size=200_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)


class GrammarError(ValueError):
    """A grammar, schema or pattern that cannot be compiled; the message is meant for the client."""


class Grammar:
    """An answer's place in its grammar: which tokens may come next. A `core.TokenConstraint`."""

    def __init__(self, matcher: LLMatcher) -> None:
        """Computes the first mask. Raises ConstraintError where that costs too much."""
        self._matcher = matcher
        self._allowed = self._mask()

    @property
    def allowed(self) -> bytes:
        return self._allowed

    def advance(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            raise ConstraintError(f"the answer's grammar cannot go on after token {token_id}: {self._error()}")
        self._allowed = self._mask()

    def fork(self) -> Self:
        found = type(self).__new__(type(self))
        found._matcher, found._allowed = self._matcher.deep_copy(), self._allowed
        return found

    def _mask(self) -> bytes:
        allowed = bytes(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            raise ConstraintError(f"the answer's grammar is too complex: {self._error()}; use a simpler one")
        return allowed

    def _error(self) -> str:
        return first_line(self._matcher.get_error())


class GrammarVocabulary:
    """One model's tokens as grammars see them, built when the first grammar needs it. Thread-safe.

    eos_token_ids: what ends an answer whose grammar is complete.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def grammar(self, source: str) -> Grammar:
        """A grammar's first state. source: from `LLMatcher.grammar_from_*`. Raises GrammarError."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._load()
            tokenizer = self._tokenizer
            if (found := self._compiled.get(source)) is not None:
                self._compiled.move_to_end(source)
                return found.fork()
        compiled = self._compile(source, tokenizer)  # without the lock: one slow grammar holds up no other
        with self._lock:
            self._compiled[source] = compiled
            if len(self._compiled) > MAX_CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
            return compiled.fork()

    def _compile(self, source: str, tokenizer: LLTokenizer) -> Grammar:
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarError(first_line(matcher.get_error()))
        try:
            return Grammar(matcher)
        except ConstraintError as error:
            raise GrammarError(str(error)) from None

    def _load(self) -> LLTokenizer:
        if not self._eos_token_ids:
            raise GrammarError("this model has no end token, so an answer in a grammar could not end")
        try:
            return LLTokenizer(self._tokenizer_json, n_vocab=self._vocab_size, eos_token=list(self._eos_token_ids))
        except Exception as error:  # the library raises plain exceptions for tokenizers it cannot read
            raise GrammarError(
                f"this model's tokenizer cannot be used with grammars: {first_line(str(error))}"
            ) from None


def first_line(text: str) -> str:
    """A library's message in one line, without its dumps of state."""
    shown = text.split("<state>")[0].split("<grammar>")[0]
    return " ".join(shown.split()).removeprefix("Parser Error: ")
