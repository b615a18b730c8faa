"""From token ids to text, one token at a time: whole characters only, and never past a stop string."""

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces, and holds back what may still become one.

    The stop string that is complete first wins; among those complete at the same character, the longest. So the result
    does not depend on how the text is cut into tokens.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._include = include
        self._held = ""
        self._longest = len(self._stops[0]) if self._stops else 0

    @property
    def holds_back(self) -> bool:
        return bool(self._held)

    def feed(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """(text that is safe to send, the stop string that matched or None). Nothing may be fed after a match.

        With `may_stop` false (below min_tokens) complete matches are let through as ordinary text.
        """
        if not self._stops:
            return text, None
        known = len(self._held)
        held = self._held + text
        if may_stop and text:
            for end in range(known + 1, len(held) + 1):
                for stop in self._stops:
                    if held.endswith(stop, 0, end):
                        self._held = ""
                        return held[: end if self._include else end - len(stop)], stop
        keep = self._possible_prefix(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], None

    def flush(self) -> str:
        """What was held back; nothing more comes."""
        held, self._held = self._held, ""
        return held

    def _possible_prefix(self, text: str) -> int:
        """Length of the longest end of `text` with which some stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class Piece(NamedTuple):
    """Text that one token released, and the stop string that ended the sequence with it, if one did."""

    text: str
    stop: str | None = None


class Detokenizer:
    """The text of one sequence, incrementally. Characters split over tokens come whole with their last token.

    An id that the tokenizer does not have decodes to nothing. Text of a character that was never completed is U+FFFD,
    at the end and only there, as if all ids were decoded at once.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stop, include=include_stop_str_in_output)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._ids: list[int] = []  # since the text was last whole, with the ids before that give them their context
        self._num_context = 0

    @property
    def holds_back(self) -> bool:
        """Whether text of tokens already seen has not been released."""
        return self._stops.holds_back or len(self._ids) > self._num_context

    def feed(self, token_id: int) -> Piece:
        """The text that this token releases."""
        self._num_tokens += 1
        self._ids.append(token_id)
        text = self._stream.step(self._tokenizer, token_id)
        if text is None:
            return Piece("")
        self._ids = self._ids[self._num_context :]
        self._num_context = len(self._ids)
        return Piece(*self._stops.feed(text, may_stop=self._num_tokens >= self._min_tokens))

    def finish(self) -> Piece:
        """Release all that is held back: the sequence has ended without a stop string."""
        text, stop = self._stops.feed(self._incomplete_text())
        return Piece(text, stop) if stop is not None else Piece(text + self._stops.flush())

    def _incomplete_text(self) -> str:
        """Text of the ids that the stream waits with: characters begun and not completed."""
        if len(self._ids) == self._num_context:
            return ""
        whole = self._decode(self._ids)
        context = self._decode(self._ids[: self._num_context])
        return whole[len(context) :] if whole.startswith(context) else ""

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens))
