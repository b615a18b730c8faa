"""One answer's text, as it comes, taken apart into reasoning, content and tool calls.

transformers' ResponseParser finds the parts; it is imported when the first model that needs it is asked, in a thread.
"""

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from crosspool.engine.output import RequestOutput
from crosspool.server.answer_formats import THINK_OPEN, AnswerFormat, Types
from crosspool.server.call_readers import Call, CallReader

NO_ANCHOR = "\x00"  # the prefix handed over holds nothing of earlier turns


@dataclass(slots=True)
class CallPiece:
    """What a tool call gained. id and name come with its first piece alone."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class AnswerPiece:
    """What an answer gained."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.reasoning or self.calls)


_TEMPLATES: dict[tuple[AnswerFormat, bool], Any] = {}


def has_template(form: AnswerFormat, with_calls: bool) -> bool:
    """Whether `response_template` has been asked for it before and answers at once."""
    return (form, with_calls) in _TEMPLATES


def response_template(form: AnswerFormat, with_calls: bool) -> Any:
    """transformers' form of the marks. Imports transformers: not for the event loop the first time."""
    found = _TEMPLATES.get((form, with_calls))
    if found is None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        fields = form.fields(with_calls=with_calls)
        found = load_response_template({"start_anchor": NO_ANCHOR, "fields": fields})
        _TEMPLATES[form, with_calls] = found
    return found


class AnswerParser:
    """Fed with an answer's text; `finish` gives the rest. White space around the parts is dropped.

    is_thinking: the prompt has opened the reasoning already. Text of a call that cannot be read is content.
    """

    def __init__(self, form: AnswerFormat, *, with_calls: bool, types: Types, is_thinking: bool = False) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._form = form
        self._types = types
        self._reader: CallReader | None = None
        self._raw = ""  # of the call that is being read
        self._calls: list[Call] = []
        self._sent: list[int] = []  # characters of each call's arguments
        self._texts = {"content": _Text(keeps_start=form.is_plain), "reasoning": _Text()}
        template = response_template(form, with_calls)
        self._parser = ResponseParser(template, prefix=THINK_OPEN if is_thinking else "")

    @property
    def has_whole_calls(self) -> bool:
        """Whether there are tool calls and the arguments of each one are complete."""
        return bool(self._calls) and all(call.is_whole for call in self._calls)

    def feed(self, text: str) -> AnswerPiece:
        piece = AnswerPiece()
        self._take(self._parser.feed(text), piece, is_end=False)
        return piece

    def finish(self) -> AnswerPiece:
        piece = AnswerPiece()
        _, events = self._parser.finalize()
        self._take(events, piece, is_end=True)
        if not self._calls:
            piece.content += self._texts["content"].rest()
        return piece

    def _take(self, events: Sequence[dict[str, Any]], piece: AnswerPiece, *, is_end: bool) -> None:
        for event in events:
            part, kind = event["field"], event["type"]
            if part == "tool_calls":
                self._take_call(kind, event.get("text", ""), piece, is_cut=is_end)
            elif part in self._texts:
                text = self._texts[part]
                shown = text.feed(event["text"]) if kind == "region_chunk" else ""
                if part == "content":
                    piece.content += shown
                else:
                    piece.reasoning += shown
                    if kind == "region_close":
                        text.drop()

    def _take_call(self, kind: str, text: str, piece: AnswerPiece, *, is_cut: bool) -> None:
        if kind == "region_open":
            assert self._form.calls is not None, "calls are parsed where the format has some"
            self._reader, self._raw = self._form.calls.reader(self._types), ""
            return
        assert self._reader is not None, "a region opens first"
        before = len(self._reader.calls)
        if kind == "region_chunk":
            self._raw += text
            self._reader.feed(text)
        else:
            self._reader.close(is_cut=is_cut)
        self._calls += self._reader.calls[before:]
        for index in range(len(self._calls) - len(self._reader.calls), len(self._calls)):
            self._tell(index, piece)
        if kind == "region_close" and not self._reader.calls:
            piece.content += self._texts["content"].feed(self._raw)

    def _tell(self, index: int, piece: AnswerPiece) -> None:
        """The call's news."""
        call = self._calls[index]
        if index == len(self._sent):
            assert self._form.calls is not None, "calls are parsed where the format has some"
            self._texts["content"].drop()
            self._sent.append(0)
            piece.calls.append(CallPiece(index, call.arguments, _call_id(self._form.calls.short_ids), call.name))
        elif len(call.arguments) > self._sent[index]:
            piece.calls.append(CallPiece(index, call.arguments[self._sent[index] :]))
        self._sent[index] = len(call.arguments)


def pieces_of(output: RequestOutput, parser: AnswerParser | None) -> list[AnswerPiece]:
    """What one output gains an answer, with its last output the rest too. parser: None: all is content."""
    if parser is None:
        return [AnswerPiece(output.text)]
    found = [parser.feed(output.text)]
    return found if output.finish_reason is None else [*found, parser.finish()]


@dataclass(slots=True)
class _Text:
    """Holds white space back until more text follows, so that none is left at the end of a part, or at its start."""

    keeps_start: bool = False
    _held: str = ""
    _has_text: bool = False

    def feed(self, text: str) -> str:
        whole = self._held + text
        shown = whole.rstrip()
        self._held = whole[len(shown) :]
        if not self._has_text and not self.keeps_start:
            shown, self._held = shown.lstrip(), self._held if shown else ""
        self._has_text = self._has_text or bool(shown)
        return shown

    def rest(self) -> str:
        found, self._held = self._held, ""
        return found

    def drop(self) -> None:
        self._held = ""


def _call_id(is_short: bool) -> str:
    if not is_short:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
