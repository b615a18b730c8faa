"""`crosspool load` and `crosspool unload`: models of a running server come and go while the others answer."""

import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Console

from crosspool.deployment.model_source import is_hub_id, named_source
from crosspool.errors import CrossPoolError
from crosspool.server_client import ServerClient
from crosspool.units import format_bytes

LIST = "/admin/models"
POLL_S = 0.2


def load(client: ServerClient, source: str, fields: dict[str, Any], *, waits: bool, console: Console) -> None:
    """Load DIR, a Hugging Face id, or NAME=DIR, as `crosspool serve` names them; `fields` are of the request's body.

    A directory that is here is sent by its absolute path. Raises CrossPoolError for what the server refuses, and for a
    load that fails.
    """
    name, path = _named(source)
    body = {"path": path, "wait": False, **{key: value for key, value in fields.items() if value not in (None, [])}}
    client.post(f"{LIST}/{quote(name, safe='/')}/load", body)
    if not waits:
        _say(console, f"loading {name}; `crosspool ps` tells when it is ready")
        return
    with console.status(f"loading {name}") as status:
        while (row := _row(client, name)) is not None and row["state"] == "loading":
            total = format_bytes(row["total_bytes"]) if row["total_bytes"] else "?"
            status.update(f"loading {name}: {format_bytes(row['loaded_bytes'])} of {total}")
            time.sleep(POLL_S)
    if row is None or row["state"] != "ready":
        raise CrossPoolError(f"{name} was not loaded: {_reason(row)}")
    size = format_bytes(sum(row["bytes_by_rank"].values()))
    _say(console, f"loaded {name}: {size} in {row['load_s']:.2f} s, context {row['context_limit']} tokens")


def unload(client: ServerClient, name: str, *, drains: bool, waits: bool, console: Console) -> None:
    """Take a model away. drains: accepted requests end first. Raises CrossPoolError for what the server refuses."""
    own = client.post(f"{LIST}/{quote(name, safe='/')}/unload", {"drain": drains, "wait": False})["name"]
    if not waits:
        _say(console, f"unloading {own}; new requests are refused")
        return
    with console.status(f"unloading {own}") as status:
        while (row := _row(client, own)) is not None and row["state"] == "draining":
            status.update(f"unloading {own}: {row['num_running']} running, {row['num_queued']} queued")
            time.sleep(POLL_S)
    if row is not None:
        raise CrossPoolError(f"{own} was not unloaded: it is {row['state']}")
    _say(console, f"unloaded {own}")


def _named(source: str) -> tuple[str, str]:
    """The name that a model is loaded under, and where the server finds it."""
    name, place = named_source(source)
    path = str(Path(place).resolve()) if Path(place).exists() else place
    name = name or (path if is_hub_id(path) else Path(path).name)
    if not name:
        raise CrossPoolError(f"{source!r} gives the model no name; write NAME={source}")
    return name, path


def _row(client: ServerClient, name: str) -> dict[str, Any] | None:
    rows: list[dict[str, Any]] = client.get(LIST)["data"]
    return next((row for row in rows if row["name"] == name), None)


def _reason(row: dict[str, Any] | None) -> str:
    return "it was unloaded meanwhile" if row is None else row["error"] or f"it is {row['state']}"


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
