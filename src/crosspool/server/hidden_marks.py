"""Special tokens in a client's own text stay plain text: hidden while a template runs, revealed when it has run."""

import re
import secrets
from typing import Any

from crosspool.server.messages import Message

REASONING_MARKS = ("<think>", "</think>")
"""Templates split these off assistant turns themselves, so there they stay what they are."""


class HiddenMarks:
    """Swaps special tokens in a client's text for placeholders that no client can guess, and back."""

    def __init__(self, special_tokens: dict[str, int]) -> None:
        ordered = sorted(special_tokens, key=len, reverse=True)
        self._marks = ordered
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._nonce = secrets.token_hex(8)
        self._index = {mark: index for index, mark in enumerate(ordered)}
        self.used = False

    def hide_message(self, message: Message) -> Message:
        keep = REASONING_MARKS if message["role"] == "assistant" else ()
        return {key: item if key == "role" else self.hide(item, keep) for key, item in message.items()}

    def hide(self, value: Any, keep: tuple[str, ...] = ()) -> Any:
        """`value` with the marks in its strings (and those of dicts and lists in it) hidden, but for `keep`."""
        if isinstance(value, str) and self._pattern is not None:
            return self._pattern.sub(lambda match: self._placeholder(match[0], keep), value)
        if isinstance(value, dict):
            return {self.hide(key, keep): self.hide(item, keep) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hide(item, keep) for item in value]
        return value

    def split_at_marks(self, text: str) -> list[str]:
        """`text` cut into the marks that the template wrote and what lies between them."""
        assert self._pattern is not None, "marks were hidden, so there is a pattern"
        return [piece for piece in re.split(f"({self._pattern.pattern})", text) if piece]

    def reveal(self, text: str) -> str:
        return re.sub(f"\ue000{self._nonce}:(\\d+)\ue001", lambda match: self._marks[int(match[1])], text)

    def _placeholder(self, mark: str, keep: tuple[str, ...]) -> str:
        if mark in keep:
            return mark
        self.used = True
        return f"\ue000{self._nonce}:{self._index[mark]}\ue001"
