"""Answers of Anthropic's Messages API: content blocks, whole or as events."""

import json
from typing import Any

from crosspool.core import FinishReason
from crosspool.engine.output import RequestOutput
from crosspool.server.answer_parser import AnswerParser, pieces_of
from crosspool.server.choices import Json

DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
FIELDS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}


class MessageBlocks:
    """The blocks of one answer as its outputs come; `events` are those of a stream. parser: None: all is text."""

    def __init__(self, parser: AnswerParser | None) -> None:
        self.blocks: list[Json] = []
        self._inputs: list[str] = []  # of each block: the JSON text of a tool's input
        self._parser = parser
        self._is_open = False
        self._call_blocks: dict[int, int] = {}
        self.last: RequestOutput | None = None

    def add(self, output: RequestOutput) -> list[Json]:
        """Take in one output; the events it makes."""
        self.last = output
        events: list[Json] = []
        for piece in pieces_of(output, self._parser):
            if piece.reasoning:
                self._write("thinking", piece.reasoning, events, {"thinking": "", "signature": ""})
            if piece.content:
                self._write("text", piece.content, events, {"text": ""})
            for call in piece.calls:
                if call.name is not None:
                    self._open({"type": "tool_use", "id": call.id, "name": call.name, "input": {}}, events)
                    self._call_blocks[call.index] = len(self.blocks) - 1
                if call.arguments:
                    self._delta(self._call_blocks[call.index], "tool_use", call.arguments, events)
        if output.finish_reason is not None:
            self._close(events)
            for block, written in zip(self.blocks, self._inputs, strict=True):
                if block["type"] == "tool_use":
                    block["input"] = _object(written)
        return events

    @property
    def stop(self) -> tuple[str | None, str | None]:
        """stop_reason and stop_sequence."""
        assert self.last is not None, "after the last output"
        if self.last.finish_reason is FinishReason.LENGTH:
            return "max_tokens", None
        if isinstance(self.last.stop_reason, str):
            return "stop_sequence", self.last.stop_reason
        return ("tool_use" if self._parser is not None and self._parser.has_whole_calls else "end_turn"), None

    def _write(self, kind: str, text: str, events: list[Json], empty: Json) -> None:
        if not self._is_open or self.blocks[-1]["type"] != kind:
            self._open({"type": kind, **empty}, events)
        self.blocks[-1][kind] += text
        self._delta(len(self.blocks) - 1, kind, text, events)

    def _open(self, block: Json, events: list[Json]) -> None:
        self._close(events)
        self.blocks.append(block)
        self._inputs.append("")
        self._is_open = True
        events.append({"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)})

    def _delta(self, index: int, kind: str, text: str, events: list[Json]) -> None:
        if kind == "tool_use":
            self._inputs[index] += text
        delta = {"type": DELTAS[kind], FIELDS[kind]: text}
        events.append({"type": "content_block_delta", "index": index, "delta": delta})

    def _close(self, events: list[Json]) -> None:
        if self._is_open:
            self._is_open = False
            events.append({"type": "content_block_stop", "index": len(self.blocks) - 1})


def usage(output: RequestOutput | None, prompt_tokens: int) -> Json:
    cached = output.usage.cached_tokens if output is not None else 0
    return {
        "input_tokens": prompt_tokens - cached,
        "output_tokens": output.usage.completion_tokens if output is not None else 0,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


def _object(written: str) -> Any:
    """A tool's input; of a call cut short, nothing."""
    try:
        return json.loads(written)
    except ValueError:
        return {}
