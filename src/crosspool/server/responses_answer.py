"""Answers of OpenAI's Responses API: output items, whole or as events with running numbers."""

import uuid
from typing import Any

from crosspool.core import FinishReason
from crosspool.engine.output import RequestOutput
from crosspool.server.answer_parser import AnswerParser, pieces_of
from crosspool.server.choices import Json

PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponseItems:
    """The items of one answer as its outputs come. parser: None: all is text."""

    def __init__(self, parser: AnswerParser | None) -> None:
        self.items: list[Json] = []
        self.last: RequestOutput | None = None
        self._parser = parser
        self._call_items: dict[int, int] = {}
        self._is_open = False

    @property
    def is_cut(self) -> bool:
        return self.last is not None and self.last.finish_reason is FinishReason.LENGTH

    def add(self, output: RequestOutput) -> list[Json]:
        """Take in one output; the events it makes."""
        self.last = output
        events: list[Json] = []
        for piece in pieces_of(output, self._parser):
            for kind, text in (("reasoning", piece.reasoning), ("message", piece.content)):
                if text:
                    self._write(kind, text, events)
            for call in piece.calls:
                if call.name is not None:
                    started = {"call_id": call.id, "name": call.name, "arguments": ""}
                    self._call_items[call.index] = self._open("function_call", started, events)
                if call.arguments:
                    index = self._call_items[call.index]
                    self.items[index]["arguments"] += call.arguments
                    events.append(self._event("function_call_arguments.delta", index, delta=call.arguments))
        if output.finish_reason is not None:
            self._close(events)
        return events

    def fail(self) -> None:
        """No more comes, and what was being written stays as it is."""
        if self._is_open:
            self._is_open = False
            self.items[-1]["status"] = "incomplete"

    def _write(self, kind: str, text: str, events: list[Json]) -> None:
        if not self._is_open or self.items[-1]["type"] != kind:
            fields: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
            index = self._open(kind, {**fields, "content": []}, events)
            self.items[index]["content"].append(_part(kind, ""))
            events.append(self._event("content_part.added", index, content_index=0, part=_part(kind, "")))
        index = len(self.items) - 1
        self.items[index]["content"][0]["text"] += text
        events.append(self._text_event(kind, "delta", index, delta=text))

    def _open(self, kind: str, fields: Json, events: list[Json]) -> int:
        self._close(events)
        item: Json = {"id": f"{PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        self._is_open = True
        index = len(self.items) - 1
        shown = {**item, "content": []} if "content" in item else dict(item)
        events.append({"type": "response.output_item.added", "output_index": index, "item": shown})
        return index

    def _close(self, events: list[Json]) -> None:
        if not self._is_open:
            return
        self._is_open = False
        index, item = len(self.items) - 1, self.items[-1]
        is_end = self.last is not None and self.last.finish_reason is not None
        item["status"] = "incomplete" if is_end and self.is_cut else "completed"
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._event("function_call_arguments.done", index, **done))
        else:
            part = item["content"][0]
            events.append(self._text_event(item["type"], "done", index, text=part["text"]))
            events.append(self._event("content_part.done", index, content_index=0, part=dict(part)))
        events.append({"type": "response.output_item.done", "output_index": index, "item": dict(item)})

    def _text_event(self, kind: str, what: str, index: int, **fields: Any) -> Json:
        name = "output_text" if kind == "message" else "reasoning_text"
        extra: Json = {"logprobs": []} if kind == "message" else {}
        return self._event(f"{name}.{what}", index, content_index=0, **fields, **extra)

    def _event(self, name: str, index: int, /, **fields: Any) -> Json:
        return {"type": f"response.{name}", "item_id": self.items[index]["id"], "output_index": index, **fields}


def usage(output: RequestOutput | None) -> Json | None:
    if output is None:
        return None
    given = output.usage
    return {
        "input_tokens": given.prompt_tokens,
        "input_tokens_details": {"cached_tokens": given.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": given.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": given.prompt_tokens + given.completion_tokens,
    }


def _part(kind: str, text: str) -> Json:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}
