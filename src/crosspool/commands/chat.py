"""`crosspool chat`: talk to one model of a running server, streaming."""

import sys
from typing import Any

from crosspool.errors import CrossPoolError
from crosspool.server_client import ServerClient


def run(
    client: ServerClient, model: str | None, *, quick: str | None, system: str | None, options: dict[str, Any]
) -> None:
    """One answer to `quick`, or turn after turn from standard input until it ends. /reset forgets, /exit leaves."""
    model = model or _only_model(client)
    history: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    if quick is not None:
        _turn(client, model, [*history, {"role": "user", "content": quick}], options)
        return
    start = list(history)
    if sys.stdin.isatty():
        print(f"talking to {model}; /reset forgets, Ctrl-C stops an answer, /exit or Ctrl-D leaves", file=sys.stderr)
    while (line := _read()) is not None:
        if line == "/exit":
            return
        if line == "/reset":
            history = list(start)
        elif line:
            history.append({"role": "user", "content": line})
            try:
                history.append({"role": "assistant", "content": _turn(client, model, history, options)})
            except CrossPoolError as error:  # the talk may go on, without the turn that failed
                history.pop()
                print(f"error: {error}", file=sys.stderr)
            except KeyboardInterrupt:  # cuts the answer short, not the talk
                history.pop()
                print()


def _turn(client: ServerClient, model: str, messages: list[dict[str, str]], options: dict[str, Any]) -> str:
    pieces: list[str] = []
    for event in client.post_events("/v1/chat/completions", {"model": model, "messages": messages, **options}):
        for choice in event["choices"]:
            pieces.append(choice["delta"].get("content") or "")
            print(pieces[-1], end="", flush=True)
    print(flush=True)
    return "".join(pieces)


def _only_model(client: ServerClient) -> str:
    names = [card["id"] for card in client.get("/v1/models")["data"]]
    if len(names) != 1:
        raise CrossPoolError(f"the server has the models {', '.join(names)}; name one: crosspool chat MODEL")
    return str(names[0])


def _read() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
