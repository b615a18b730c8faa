"""`crosspool limits`: what the models of a running server may hold in its KV pool, shown and changed."""

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from crosspool.errors import CrossPoolError
from crosspool.server_client import ServerClient
from crosspool.units import format_bytes

PATH = "/admin/limits"
NO_CEILING = "none"


def run(
    client: ServerClient,
    model: str | None,
    *,
    floor: str | None,
    ceiling: str | None,
    budget: str | None,
    as_json: bool,
    console: Console,
) -> None:
    """Change what is given, then show all. Raises CrossPoolError, in one line, for what cannot be."""
    body = change_body(model, floor=floor, ceiling=ceiling, budget=budget)
    limits = client.patch(PATH, body) if body else client.get(PATH)
    if as_json:
        print(json.dumps(limits))
        return
    for pool in limits["pools"]:
        console.print(pool_line(pool), highlight=False, soft_wrap=True)
    console.print(models_table(limits, model))


def change_body(model: str | None, *, floor: str | None, ceiling: str | None, budget: str | None) -> dict[str, Any]:
    """The body of the request that changes these; empty where nothing is to be changed."""
    body: dict[str, Any] = {} if budget is None else {"budget": budget}
    limits: dict[str, Any] = {} if floor is None else {"floor": floor}
    if ceiling is not None:
        limits["ceiling"] = None if ceiling == NO_CEILING else ceiling
    if limits and model is None:
        raise CrossPoolError("--floor and --ceiling are of one model; name it: crosspool limits MODEL --floor 1GiB")
    if limits:
        body["models"] = {model: limits}
    return body


def pool_line(pool: dict[str, Any]) -> str:
    """One KV rank in words."""
    line = (
        f"{pool['kv_rank']}: budget {format_bytes(pool['budget_bytes'])} of {format_bytes(pool['pool_bytes'])}, "
        f"{format_bytes(pool['floors_bytes'])} kept by floors, {format_bytes(pool['used_bytes'])} used, "
        f"{format_bytes(pool['reserved_bytes'])} reserved"
    )
    return f"{line}; settling: live requests hold more than the new limits, and go on" if pool["settling"] else line


def models_table(limits: dict[str, Any], only: str | None = None) -> Table:
    """One row a model: floor, ceiling, what it holds, and the longest context that they allow."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("MODEL", overflow="fold")
    for column in ("FLOOR", "CEILING", "USED", "RESERVED", "PAGE", "CONTEXT"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = limits["models"]
    chosen = [row for row in rows if row["name"] == only] or rows
    for row in chosen:
        table.add_row(
            row["name"],
            format_bytes(row["floor_bytes"]) if row["floor_bytes"] else "-",
            "-" if row["ceiling_bytes"] is None else format_bytes(row["ceiling_bytes"]),
            format_bytes(row["used_bytes"]),
            format_bytes(row["reserved_bytes"]),
            format_bytes(row["page_bytes"]),
            str(row["context_limit"]),
        )
    return table
