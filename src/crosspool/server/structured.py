"""`response_format` and `structured_outputs`: which grammar an answer has to follow, and its compiled first state."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Protocol

from llguidance import LLMatcher

from crosspool.core import TokenConstraint
from crosspool.server.errors import APIError, bad_request, shorten
from crosspool.server.grammar import GrammarError, first_line
from crosspool.server.protocol import GenerationBody
from crosspool.server.schemas import Place, blame, check_pattern, check_schema, without_unknown_formats

MAX_CHOICES = 1_000
MAX_CHOICE_CHARACTERS = 1_000
MAX_GRAMMAR_CHARACTERS = 50_000
KINDS = ("json", "json_object", "regex", "choice", "grammar")

# Between the tokens of JSON: nothing, one space, or a line break and an indentation. A model cannot idle in blanks.
JSON_WHITESPACE = r"[ ]?|\n[ ]{0,16}"


class GrammarSource(Protocol):
    """What makes first states of grammars: a model's GrammarVocabulary, or one that puts something before them."""

    def grammar(self, source: str) -> TokenConstraint: ...


Compile = Callable[[GrammarSource], TokenConstraint]
"""From a model's vocabulary to the first state. Raises APIError (400). Takes up to seconds: not for the event loop."""


async def compiled(compile_answer: Compile, body: GenerationBody, vocabulary: GrammarSource) -> TokenConstraint:
    """The first state, made in a thread. Raises APIError (400) also for fields that no grammar goes with."""
    for name, value in (("ignore_eos", body.ignore_eos), ("min_tokens", body.min_tokens)):
        if value:
            raise bad_request(
                f"{name} cannot go with an answer in a grammar, which ends where it is complete", param=name
            )
    return await asyncio.to_thread(compile_answer, vocabulary)


def asked_grammar(body: GenerationBody) -> Compile | None:
    """What `response_format` or `structured_outputs` asks for. Raises APIError (400) for a form that nobody takes."""
    form, outputs = body.response_format, body.structured_outputs
    kind = "text" if form is None else form.get("type")
    if outputs is not None and kind != "text":
        raise bad_request(
            "structured_outputs cannot go with response_format; send one of them", param="response_format"
        )
    if outputs is not None:
        return _structured_outputs(outputs)
    if kind == "text":
        return None
    if kind == "json_object":
        return lambda vocabulary: _from_schema({"type": "object"}, "response_format", vocabulary)
    if kind != "json_schema":
        raise bad_request(
            f"response_format.type is {shorten(ascii(kind), 60)}; types are text, json_object and json_schema",
            param="response_format",
        )
    assert form is not None, "a kind other than text comes from it"
    inner = form.get("json_schema")
    place = "response_format.json_schema"
    if not isinstance(inner, dict):
        raise bad_request(f"{place} must be an object with name and schema", param=place)
    if "schema" not in inner:
        raise bad_request(f"{place}.schema is missing", param=f"{place}.schema", code="missing_required_parameter")
    return lambda vocabulary: _from_schema(inner["schema"], f"{place}.schema", vocabulary)


def _structured_outputs(outputs: dict[str, Any]) -> Compile | None:
    given = {key: value for key, value in outputs.items() if value is not None}
    unknown = sorted(set(given) - set(KINDS))
    if unknown:
        raise bad_request(
            f"structured_outputs.{shorten(unknown[0], 60)} is not offered; send one of {', '.join(KINDS)}",
            param="structured_outputs",
            code="unsupported_parameter",
        )
    if len(given) != 1:
        raise bad_request(
            f"structured_outputs holds {len(given)} of {', '.join(KINDS)}; send exactly one", param="structured_outputs"
        )
    ((kind, value),) = given.items()
    place = f"structured_outputs.{kind}"
    if kind == "json_object":
        if value is not True:
            raise bad_request(f"{place} must be true", param=place)
        return lambda vocabulary: _from_schema({"type": "object"}, place, vocabulary)
    if kind == "json":
        return lambda vocabulary: _from_schema(_loaded(value, place), place, vocabulary)
    if kind == "choice":
        choices = _choices(value, place)
        return lambda vocabulary: _from_lark(lark_of_choices(choices), place, vocabulary)
    if not isinstance(value, str) or not value:
        raise bad_request(f"{place} must be a string that is not empty", param=place)
    if len(value) > MAX_GRAMMAR_CHARACTERS:
        raise bad_request(
            f"{place} has {len(value)} characters; at most {MAX_GRAMMAR_CHARACTERS} are taken", param=place
        )
    if kind == "regex":
        return lambda vocabulary: _from_regex(value, place, vocabulary)
    return lambda vocabulary: _from_lark(value, place, vocabulary)


def schema_grammar(schema: Any) -> str:
    """The compiler's source for one checked JSON schema."""
    written = json.dumps({} if schema is True else without_unknown_formats(schema))
    source: str = LLMatcher.grammar_from_json_schema(written, overrides={"whitespace_pattern": JSON_WHITESPACE})
    return source


def lark_of_choices(choices: list[str]) -> str:
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _from_schema(schema: Any, place: str, vocabulary: GrammarSource) -> TokenConstraint:
    try:
        places = check_schema(schema)
    except GrammarError as error:
        raise refused(place, str(error)) from None
    try:
        return vocabulary.grammar(schema_grammar(schema))
    except GrammarError as error:
        raise refused_schema(place, places) or refused(place, f": {error}") from None


def refused_schema(place: str, places: list[Place]) -> APIError | None:
    """The refusal of what in a schema does not compile by itself; None where all of it does."""
    blamed = blame(places, _compile_error) if places else None
    return None if blamed is None else refused(place + blamed[0], f": {blamed[1]}")


def _compile_error(schema: Any) -> str | None:
    error: str = LLMatcher.validate_grammar(schema_grammar(schema))
    return first_line(error) if error and not error.startswith("WARNING") else None


def _from_regex(pattern: str, place: str, vocabulary: GrammarSource) -> TokenConstraint:
    try:
        check_pattern(pattern)
        return vocabulary.grammar(LLMatcher.grammar_from_regex(pattern))
    except GrammarError as error:
        raise refused(place, f": {error}") from None


def _from_lark(source: str, place: str, vocabulary: GrammarSource) -> TokenConstraint:
    try:
        return vocabulary.grammar(LLMatcher.grammar_from_lark(source))
    except GrammarError as error:
        raise refused(place, f": {error}") from None


def _loaded(value: Any, place: str) -> Any:
    """A schema, or one written as a string."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise refused(place, f": is not JSON: {error}") from None


def _choices(value: Any, place: str) -> list[str]:
    if not isinstance(value, list) or not value or any(not isinstance(item, str) or not item for item in value):
        raise bad_request(f"{place} must be a list of strings, none of them empty", param=place)
    if len(value) > MAX_CHOICES or any(len(item) > MAX_CHOICE_CHARACTERS for item in value):
        limits = f"at most {MAX_CHOICES} of up to {MAX_CHOICE_CHARACTERS} characters are taken"
        raise bad_request(f"{place} has {len(value)} strings; {limits}", param=place)
    return value


def refused(place: str, why: str) -> APIError:
    """A 400 that names the place in the grammar or schema."""
    return bad_request(shorten(place + why, 1000), param=shorten(place), code="invalid_grammar")
