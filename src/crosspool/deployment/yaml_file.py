"""YAML files that people write: a mapping whose keys stand there once. What is wrong with one is told in a line."""

from pathlib import Path
from typing import Any

import yaml

MERGE = "tag:yaml.org,2002:merge"


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys in silence: a second `models:` would take the first one's models away."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            if (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value!r} stands there a second time; join the two", problem_mark=key.start_mark
                )
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def read_mapping(path: Path, such_as: str) -> dict[Any, Any]:
    """The mapping in a file, {} if it is empty. Raises ValueError naming the file, and the line where it is broken.

    such_as: what a right one would be, for the message about a file that holds something else.
    """
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid YAML: {_problem(error)}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds a {type(loaded).__name__}; it must be a mapping {such_as}")
    return loaded


def _problem(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return " ".join(str(error).split())
