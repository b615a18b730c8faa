"""JSON schemas of clients, checked before they are compiled, so that a refusal names the place in the schema.

The checks are cheap and bounded: depth, number of subschemas, the form of the keywords that hold subschemas, types,
patterns and local references. What only the compiler refuses is traced to the innermost subschema it refuses alone.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from crosspool.server.grammar import GrammarError

MAX_SCHEMA_CHARACTERS = 200_000
MAX_SCHEMA_DEPTH = 64
MAX_SUBSCHEMAS = 2_000
MAX_TRACED = 200  # subschemas compiled alone to find the one to blame
MAX_EXPANDED_PATTERN = 20_000

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLES = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
"""Values of `format` that the compiler enforces."""

Place = tuple[str, Any]
"""A path such as `.properties.name` and the subschema there."""


def check_schema(schema: Any) -> list[Place]:
    """Every subschema with its path, innermost last. Raises GrammarError that names the first bad place."""
    if schema is False:
        raise GrammarError(": false allows no answer at all")
    try:
        size = len(json.dumps(schema))
    except RecursionError:
        raise GrammarError(": the schema is nested too deeply") from None
    if size > MAX_SCHEMA_CHARACTERS:
        raise GrammarError(f": the schema has {size} characters; at most {MAX_SCHEMA_CHARACTERS} are taken")
    found: list[Place] = []
    pending: list[tuple[str, Any, int]] = [("", schema, 0)]
    while pending:
        path, part, depth = pending.pop(0)
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise GrammarError(f"{path}: must be a schema (an object), not {_shown(part)}")
        if depth > MAX_SCHEMA_DEPTH:
            raise GrammarError(f"{path[:200]}: schemas are nested deeper than {MAX_SCHEMA_DEPTH} levels")
        found.append((path, part))
        if len(found) > MAX_SUBSCHEMAS:
            raise GrammarError(f"{path}: the schema has more than {MAX_SUBSCHEMAS} subschemas")
        _check_keywords(path, part, schema)
        pending += [(inner, item, depth + 1) for inner, item in _subschemas(path, part)]
    return found


def blame(places: list[Place], compiles: Callable[[Any], str | None]) -> tuple[str, str] | None:
    """The innermost place that does not compile alone, and why. compiles: the error of one schema, or None."""
    root = places[0][1]
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    for path, part in reversed(places[-MAX_TRACED:]):
        if (error := compiles({**shared, **part})) is not None:
            return path, error
    return None


def without_unknown_formats(schema: Any) -> Any:
    """A checked schema less each `format` that the compiler does not know: a remark (JSON Schema 2020-12, 7.2.3)."""
    if not isinstance(schema, dict):
        return schema
    kept = dict(schema)
    if isinstance(kept.get("format"), str) and kept["format"] not in FORMATS:
        del kept["format"]
    for key, value in kept.items():
        if key in MAPS:
            kept[key] = {name: without_unknown_formats(item) for name, item in value.items()}
        elif key in LISTS or (key == "items" and isinstance(value, list)):
            kept[key] = [without_unknown_formats(item) for item in value]
        elif key in SINGLES:
            kept[key] = without_unknown_formats(value)
    return kept


def check_pattern(pattern: str) -> None:
    """Raise GrammarError for a pattern whose counted repeats multiply into too many states."""
    size = _expanded_size(pattern)
    if size > MAX_EXPANDED_PATTERN:
        raise GrammarError(
            f"the pattern's repeats expand to more than {MAX_EXPANDED_PATTERN} parts; use smaller counts or * and +"
        )


def _check_keywords(path: str, part: dict[str, Any], root: Any) -> None:
    kind = part.get("type")
    for name in kind if isinstance(kind, list) else [kind]:
        if "type" in part and (not isinstance(name, str) or name not in TYPES):
            raise GrammarError(f"{path}.type: {_shown(name)} is no type; types are {', '.join(TYPES)}")
    for key in MAPS:
        if key in part and not isinstance(part[key], dict):
            raise GrammarError(f"{path}.{key}: must be an object of schemas, not {_shown(part[key])}")
    for key in LISTS:
        if key in part and not (isinstance(part[key], list) and part[key]):
            raise GrammarError(f"{path}.{key}: must be a list of schemas that is not empty, not {_shown(part[key])}")
    if "required" in part and not _is_strings(part["required"]):
        raise GrammarError(f"{path}.required: must be a list of strings, not {_shown(part['required'])}")
    if "pattern" in part:
        if not isinstance(part["pattern"], str):
            raise GrammarError(f"{path}.pattern: must be a string, not {_shown(part['pattern'])}")
        try:
            check_pattern(part["pattern"])
        except GrammarError as error:
            raise GrammarError(f"{path}.pattern: {error}") from None
    if "$ref" in part:
        _check_reference(f"{path}.$ref", part["$ref"], root)


def _check_reference(path: str, reference: Any, root: Any) -> None:
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise GrammarError(f"{path}: {_shown(reference)} is not a reference inside the schema such as #/$defs/name")
    target = root
    for raw in reference[2:].split("/") if len(reference) > 2 else ():
        step = raw.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
            target = target[int(step)]
        elif isinstance(target, dict) and step in target:
            target = target[step]
        else:
            raise GrammarError(f"{path}: {_shown(reference)} points to nothing in the schema")


def _subschemas(path: str, part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in MAPS:
        for name, item in part.get(key, {}).items():
            yield f"{path}.{key}.{name[:60]}", item
    for key in LISTS:
        for index, item in enumerate(part.get(key, ())):
            yield f"{path}.{key}[{index}]", item
    for key in SINGLES:
        if key in part:
            value = part[key]
            if key == "items" and isinstance(value, list):  # the form of older drafts
                yield from ((f"{path}.items[{index}]", item) for index, item in enumerate(value))
            else:
                yield f"{path}.{key}", value


_REPEAT = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def _expanded_size(pattern: str) -> int:
    """Parts of the pattern once counted repeats are written out, roughly; capped a little above the limit."""
    cap = 10 * MAX_EXPANDED_PATTERN
    sizes, last, index = [0], 0, 0
    while index < len(pattern):
        char = pattern[index]
        if char == "\\":
            sizes[-1], last, index = sizes[-1] + 1, 1, index + 2
            continue
        if char == "[":
            end = pattern.find("]", index + 2)
            sizes[-1], last, index = sizes[-1] + 1, 1, (len(pattern) if end < 0 else end + 1)
            continue
        if char == "(":
            sizes.append(0)
        elif char == ")" and len(sizes) > 1:
            last = max(1, sizes.pop())
            sizes[-1] = min(cap, sizes[-1] + last)
        elif char == "{" and (found := _REPEAT.match(pattern, index)):
            times = max(int(number[:9]) for number in found.groups() if number)
            sizes[-1] = min(cap, sizes[-1] + last * max(0, times - 1))
            index = found.end()
            continue
        else:
            sizes[-1], last = min(cap, sizes[-1] + 1), 1
        index += 1
    return sum(sizes)


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _shown(value: Any) -> str:
    text = ascii(value) if isinstance(value, str | int | float | bool | None) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
