"""Fields of the chat body under the names that they have in other APIs, whose requests are refused in their own words.

Bodies of /v1/responses and /v1/messages are brought to the chat body, whose checks name its fields.
"""

import re
from collections.abc import Mapping, Sequence

Names = Sequence[tuple[str, str]]
"""Patterns of the chat body's names and what stands for them; the first that fits a place counts."""

OF_RESPONSES: Names = (
    (r"structured_outputs", "text.format"),
    (r"response_format(?:\.json_schema)?\b", "text.format"),
    (r"\bmessages(?:\[\d+\]|\.\d+(?=\.))", "input"),  # turns are counted otherwise than items
    (r"(^|; )messages\b", r"\1input"),
    (r"\bmax_tokens\b", "max_output_tokens"),
    (r"\breasoning_effort\b", "reasoning.effort"),
    (r"\b(tools\[\d+\])\.function\b", r"\1"),
    (r'(?<="type": "function", )"function": \{"name": \.\.\.\}', '"name": ...'),
)
OF_MESSAGES: Names = (
    (r"structured_outputs", "output_config.format"),
    (r"response_format(?:\.json_schema)?\b", "output_config.format"),
    (r"^stop\b", "stop_sequences"),
    (r"\breasoning_effort\b", "output_config.effort"),
    (r"\b(tools\[\d+\])\.function\.parameters\b", r"\1.input_schema"),
    (r"\b(tools\[\d+\])\.function\b", r"\1"),
    (r'\btool_choice "required"', 'tool_choice "any"'),
)
BY_ROUTE: Mapping[str, Names] = {"/v1/responses": OF_RESPONSES, "/v1/messages": OF_MESSAGES}


def in_words_of(path: str, text: str) -> str:
    """A refusal's message, or the field that it blames, as clients of the route `path` know the fields."""
    names = next((names for route, names in BY_ROUTE.items() if path.startswith(route)), ())
    for pattern, name in names:
        text = re.sub(pattern, name, text)
    return text
