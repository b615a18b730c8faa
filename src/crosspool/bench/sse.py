"""One streamed request over HTTP/1.1, as an asyncio Protocol: each event gets the moment at which its bytes were read.

By hand, since the client must cost less than what it measures: no task wakes, and nothing is copied, per event.
"""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

MAX_HEAD_BYTES = 1 << 16
DONE = b"[DONE]"


class StreamError(Exception):
    """The answer is no HTTP, or ended too early; one line says how."""


class EventStreamProtocol(asyncio.Protocol):
    """Writes `request`, reads one answer. `ended` resolves once, with None or a StreamError.

    on_event(moment, data): each event's data, at `time.monotonic()` of the read that completed it. The answer's body is
    kept in `body` where it is no event stream. sent_s: when the request was written.
    """

    def __init__(self, request: bytes, on_event: Callable[[float, bytes], None]) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()
        self.sent_s = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._on_event = on_event
        self._head = bytearray()
        self._raw = bytearray()  # of a chunked body, not yet taken apart
        self._events = bytearray()
        self._left: int | None = None  # bytes to come of the body or of the chunk; None: to the end of the connection
        self._is_chunked = False
        self._is_stream = False
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        transport.write(self._request)
        self.sent_s = time.monotonic()

    def data_received(self, data: bytes) -> None:
        moment = time.monotonic()
        if self.ended.done():
            return
        try:
            if self.status == 0:
                self._head += data
                data = self._read_head()
            if data or self._left == 0:
                self._body_bytes(moment, data)
        except (StreamError, ValueError) as error:
            self._end(StreamError(str(error)))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.ended.done():
            return
        if self.status and not self._is_chunked and self._left is None and exc is None:
            self._end(None)
            return
        when = "before the answer" if self.status == 0 else "in the middle of the answer"
        self._end(StreamError(f"the connection was lost {when}" + (f": {exc}" if exc else "")))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _end(self, error: StreamError | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
        self.close()

    def _read_head(self) -> bytes:
        """Status and headers, once they are whole; the bytes behind them."""
        head, found, rest = bytes(self._head).partition(b"\r\n\r\n")
        if not found:
            if len(self._head) > MAX_HEAD_BYTES:
                raise StreamError(f"the answer's headers are longer than {MAX_HEAD_BYTES} bytes")
            return b""
        first, *lines = head.split(b"\r\n")
        words = first.split(b" ", 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise StreamError(f"the answer starts with {first[:40]!r}, which is no HTTP/1.1")
        self.status = int(words[1])
        for line in lines:
            name, _, value = line.partition(b":")
            self.headers[name.strip().lower()] = value.strip()
        self._is_chunked = self.headers.get(b"transfer-encoding", b"").lower() == b"chunked"
        self._is_stream = self.headers.get(b"content-type", b"").startswith(b"text/event-stream")
        if not self._is_chunked and b"content-length" in self.headers:
            self._left = int(self.headers[b"content-length"])
        return rest

    def _body_bytes(self, moment: float, data: bytes) -> None:
        if self._is_chunked:
            self._raw += data
            self._chunks(moment)
            return
        self._content(moment, data)
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self._end(None)

    def _chunks(self, moment: float) -> None:
        raw, place = self._raw, 0
        while not self.ended.done():
            line_end = raw.find(b"\r\n", place)
            if line_end < 0:
                break
            size = int(raw[place:line_end].partition(b";")[0], 16)
            start = line_end + 2
            if size == 0:
                self._end(None)
            elif len(raw) < start + size + 2:
                break
            else:
                self._content(moment, raw[start : start + size])
            place = start + size + 2
        del raw[:place]

    def _content(self, moment: float, data: bytes | bytearray) -> None:
        if not self._is_stream:
            self.body += data
            return
        events = self._events
        events += data.replace(b"\r\n", b"\n") if b"\r" in data else data
        *whole, rest = events.split(b"\n\n")
        for event in whole:
            if event.startswith(b"data:") and b"\n" not in event:
                self._on_event(moment, bytes(event[5:].strip()))
            else:
                lines = (line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
                if joined := b"\n".join(lines):
                    self._on_event(moment, bytes(joined))
        self._events = bytearray(rest)


def error_text(status: int, body: bytes) -> str:
    """The server's own words for a refusal, in one line, from any of the usual error bodies."""
    try:
        answer: Any = json.loads(body)
    except ValueError:
        answer = body.decode("utf-8", "replace")[:200]
    if isinstance(answer, dict):
        answer = answer.get("error", answer.get("message", answer))
    if isinstance(answer, dict):
        answer = answer.get("message", answer)
    return " ".join(f"HTTP {status}: {answer}".split())[:300]
