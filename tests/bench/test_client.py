"""The client against a scripted server that speaks HTTP by hand: every way in which an answer may come or fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import pytest

from crosspool.bench.client import ENDED, NOT_SERVED, TOKENS, LoadSettings, run_load
from crosspool.bench.target import Target
from crosspool.bench.traffic import PlannedRequest

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(text=None, **more):
    body = {"choices": [] if text is None else [{"index": 0, "text": text, "finish_reason": None}], **more}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def chunked(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole(*events):
    return HEAD + b"".join(map(chunked, (*events, b"data: [DONE]\n\n"))) + b"0\r\n\r\n"


def planned(num=1, due_s=0.0, output_tokens=4):
    return [
        PlannedRequest(index=index, due_s=due_s, model="m", prompt_tokens=3, output_tokens=output_tokens)
        for index in range(num)
    ]


async def load(pieces, requests=None, settings=None, pause_s=0.0, goes_on=lambda sent, seen, tally: True, **target):
    """Records of requests to a server that sends `pieces` and closes; the bodies it got; the client's tally.

    Behind each piece it pauses for `pause_s` from when it `goes_on`, by the pieces sent, the bodies and the tally.
    """
    seen, tally = [], [0, 0, 0, 0]

    async def answer(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        seen.append((head, json.loads(await reader.readexactly(length))))
        for sent, piece in enumerate(pieces, 1):
            writer.write(piece)
            with contextlib.suppress(OSError):  # the client has left
                await writer.drain()
            while not goes_on(sent, seen, tally):
                await asyncio.sleep(0.001)
            await asyncio.sleep(pause_s)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        answered.append(None)

    answered = []
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        where = Target(base_url=f"http://127.0.0.1:{port}/v1", **target)
        run = await run_load(requests or planned(), {"m": where}, settings or LoadSettings(timeout_s=5.0), tally)
        while len(answered) < len(run.records):
            await asyncio.sleep(0.01)
    return run, seen, tally


async def test_tokens_are_timed_and_counted():
    usage = {"prompt_tokens": 3, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}}
    pieces = [HEAD, chunked(event("a")), chunked(event("b")), whole(event("c"), event(usage=usage))[len(HEAD) :]]
    begun_s = time.monotonic()
    run, _, tally = await load(pieces, pause_s=0.05, goes_on=lambda sent, seen, tally: tally[TOKENS] >= sent - 1)
    elapsed_s = time.monotonic() - begun_s
    (record,) = run.records
    assert record.outcome == "served"
    assert record.text == "abc"
    assert (record.output_tokens, record.server_prompt_tokens, record.cached_tokens) == (5, 3, 2)
    assert record.started_s <= record.sent_s <= record.token_times_s[0]
    assert [gap > 0.04 for gap in record.gaps_s] == [True, True]
    assert record.token_times_s[-1] < elapsed_s
    assert record.tpot_s == pytest.approx((record.e2e_s - record.ttft_s) / 4)
    assert (tally[ENDED], tally[NOT_SERVED], tally[TOKENS]) == (1, 0, 3)


async def test_an_answer_may_be_cut_anywhere():
    answer = whole(event("a"), b": a comment\n\n" + event("b") + event("c"), event(usage={"completion_tokens": 3}))
    run, _, _ = await load([answer[place : place + 7] for place in range(0, len(answer), 7)])
    assert (run.records[0].outcome, run.records[0].text, run.records[0].output_tokens) == ("served", "abc", 3)


async def test_a_stream_that_ends_with_its_connection():
    head = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    body = event("a").replace(b"\n", b"\r\n") + b"data: [DONE]\r\n\r\n"
    run, _, _ = await load([head + body])
    assert (run.records[0].outcome, run.records[0].text) == ("served", "a")


async def test_pieces_of_a_chat_count_where_they_have_text():
    opening = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    thought = {"choices": [{"delta": {"reasoning_content": "hm "}, "finish_reason": None}]}
    word = {"choices": [{"delta": {"content": "yes"}, "finish_reason": None}]}
    end = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    events = [b"data: " + json.dumps(body).encode() + b"\n\n" for body in (opening, thought, word, end)]
    run, seen, _ = await load([whole(*events)], endpoint="/v1/chat/completions")
    assert (run.records[0].text, len(run.records[0].token_times_s)) == ("hm yes", 2)
    assert len(seen[0][1]["messages"][0]["content"].split()) == 3


def plain(status, body):
    return b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


FAILURES = {
    "full": (plain(429, b'{"error": {"message": "the queue is full"}}'), "refused", "HTTP 429: the queue is full"),
    "down": (plain(503, b""), "refused", "HTTP 503"),
    "wrong": (plain(400, b'{"object": "error", "message": "too long"}'), "failed", "HTTP 400: too long"),
    "no http": (b"SSH-2.0-x\r\n\r\n", "failed", "no HTTP/1.1"),
    "silent": (b"", "failed", "lost before the answer"),
    "cut": (HEAD + chunked(event("a")), "failed", "lost in the middle"),
    "empty": (whole(), "failed", "no token"),
    "error event": (whole(event("a"), event(error={"message": "a rank was lost"})), "failed", "a rank was lost"),
    "no end": (HEAD + chunked(event("a")) + b"0\r\n\r\n", "failed", "without [DONE]"),
    "no json": (whole(b"data: {nonsense\n\n"), "failed", "Expecting"),
    "bad chunk": (HEAD + b"zz\r\nabc", "failed", "invalid literal"),
    "list": (whole(b"data: [1]\n\n"), "failed", "lost in the middle"),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_failure_is_an_outcome_with_its_reason(name):
    answer, outcome, reason = FAILURES[name]
    run, _, tally = await load([answer])
    assert run.records[0].outcome == outcome
    assert reason in run.records[0].error
    assert tally[NOT_SERVED] == 1


async def test_nobody_listens():
    run = await run_load(planned(), {"m": Target(base_url="http://127.0.0.1:9")}, LoadSettings(), [0, 0, 0, 0])
    assert run.records[0].outcome == "failed"
    assert "refused" in run.records[0].error.lower() or "connect" in run.records[0].error.lower()


async def test_a_request_has_a_time_limit():
    run, _, _ = await load([HEAD], settings=LoadSettings(timeout_s=0.2), pause_s=0.5)
    assert run.records[0].error == "no whole answer within 0.2 s"


async def test_requests_go_out_at_their_times_whatever_the_server_does():
    requests = [
        PlannedRequest(index=index, due_s=0.05 * index, model="m", prompt_tokens=1, output_tokens=1)
        for index in range(8)
    ]
    answer = [HEAD, whole(event("a"))[len(HEAD) :]]
    run, _, _ = await load(answer, requests, goes_on=lambda sent, seen, tally: len(seen) == len(requests))
    for record in run.records:
        assert 0 <= record.started_s - record.due_s < 0.5
        assert record.outcome == "served", "it waited for answers"  # of which none has a token before all have asked
    assert len(run.late_s) == 8
    assert run.loop_lags_s


async def test_a_closed_loop_never_has_more_under_way_than_allowed():
    run, _, _ = await load(
        [HEAD, whole(event("a"))[len(HEAD) :]], planned(6), LoadSettings(max_concurrency=2), pause_s=0.05
    )
    starts = sorted((record.started_s, 1) for record in run.records)
    ends = [(record.token_times_s[-1], -1) for record in run.records]
    running = most = 0
    for _, change in sorted(starts + ends):
        running += change
        most = max(most, running)
    assert most == 2
    assert all(record.outcome == "served" for record in run.records)


async def test_what_is_sent():
    extra = {"top_k": 1}
    _, seen, _ = await load([whole(event("a"))], planned(2), api_key="k", extra_body=extra, temperature=0.0)
    head, body = seen[0]
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer k\r\n" in head
    assert body["model"] == "m"
    assert (body["max_tokens"], body["ignore_eos"], body["stream"], body["temperature"]) == (4, True, True, 0.0)
    assert body["top_k"] == 1
    assert len(body["prompt"]) == 3
    assert all(10 <= token < 1000 for token in body["prompt"])
    assert seen[0][1]["prompt"] != seen[1][1]["prompt"]  # no prefix cache answers the second


def test_the_same_seed_sends_the_same_request():
    (one,) = planned()
    assert Target(base_url="http://x", seed=4).request(one) == Target(base_url="http://x", seed=4).request(one)
    assert Target(base_url="http://x", seed=4).request(one) != Target(base_url="http://x", seed=5).request(one)


def test_wrong_targets_are_refused():
    with pytest.raises(ValueError, match="base-url is 'localhost:8000'; it must be like"):
        Target(base_url="localhost:8000")
    with pytest.raises(ValueError, match="endpoint is '/v1/models'"):
        Target(base_url="http://x", endpoint="/v1/models")


async def test_a_core_reads_many_more_tokens_than_any_engine_here_sends():
    """200 us of processor time a token would be 5,000 tokens a second; this takes about 10."""
    answer = whole(*(event(" sea") for _ in range(4000)))
    before = time.process_time()  # of client and scripted server together
    run, _, _ = await load([answer])
    assert len(run.records[0].token_times_s) == 4000
    assert time.process_time() - before < 4000 * 200e-6
