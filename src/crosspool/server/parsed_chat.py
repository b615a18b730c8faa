"""Chat choices whose text is taken apart: content, reasoning and tool calls, whole or in pieces."""

from collections.abc import Callable, Sequence

from crosspool.core import FinishReason
from crosspool.engine.output import RequestOutput
from crosspool.server.answer_parser import AnswerParser, AnswerPiece, CallPiece
from crosspool.server.choices import ChatShape, Json
from crosspool.server.tokenizer import TextTokenizer


class ParsedChatShape(ChatShape):
    """As ChatShape; every choice has a parser of its own.

    finish_reason is tool_calls only where calls are whole: one cut by the output limit ends with length, in pieces and
    whole alike. show_reasoning: false leaves the reasoning out.
    """

    def __init__(self, tokenizer: TextTokenizer, parser: Callable[[], AnswerParser], *, show_reasoning: bool) -> None:
        super().__init__(tokenizer)
        self._make_parser = parser
        self._show_reasoning = show_reasoning
        self._parsers: dict[int, AnswerParser] = {}

    def piece(self, index: int, output: RequestOutput) -> Json | None:
        found = self._parse(index, output)
        if found.is_empty and not output.logprobs and output.finish_reason is None:
            return None
        return {
            "index": index,
            "delta": self._fields(found, [_call_delta(call) for call in found.calls]),
            "logprobs": self._logprobs(output.logprobs),
            "finish_reason": self._reason(index, output),
            "stop_reason": output.stop_reason,
        }

    def whole(self, index: int, outputs: Sequence[RequestOutput]) -> Json:
        pieces = [self._parse(index, output) for output in outputs]
        joined = AnswerPiece("".join(piece.content for piece in pieces), "".join(piece.reasoning for piece in pieces))
        calls = _joined_calls(pieces)
        message = {"role": "assistant", "content": None, **self._fields(joined, calls), "refusal": None}
        if not calls and message["content"] is None:
            message["content"] = ""
        plain = super().whole(index, outputs)
        return {**plain, "message": message, "finish_reason": self._reason(index, outputs[-1])}

    def _parse(self, index: int, output: RequestOutput) -> AnswerPiece:
        """What the output adds; with its last output, the rest too."""
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._make_parser()
        found = parser.feed(output.text)
        if output.finish_reason is not None:
            rest = parser.finish()
            found = AnswerPiece(found.content + rest.content, found.reasoning + rest.reasoning, found.calls)
            for call in rest.calls:
                _merge(found.calls, call)
        return found

    def _reason(self, index: int, output: RequestOutput) -> str | None:
        if output.finish_reason is FinishReason.STOP and self._parsers[index].has_whole_calls:
            return "tool_calls"
        return output.finish_reason

    def _fields(self, piece: AnswerPiece, calls: list[Json]) -> Json:
        """Both names of reasoning: `reasoning` and the older `reasoning_content`."""
        found: Json = {}
        if piece.content:
            found["content"] = piece.content
        if piece.reasoning and self._show_reasoning:
            found |= {"reasoning": piece.reasoning, "reasoning_content": piece.reasoning}
        if calls:
            found["tool_calls"] = calls
        return found


def _call_delta(call: CallPiece) -> Json:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _joined_calls(pieces: Sequence[AnswerPiece]) -> list[Json]:
    joined: list[CallPiece] = []
    for piece in pieces:
        for call in piece.calls:
            _merge(joined, call)
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in joined
    ]


def _merge(calls: list[CallPiece], more: CallPiece) -> None:
    for call in calls:
        if call.index == more.index:
            call.arguments += more.arguments
            return
    calls.append(more)
