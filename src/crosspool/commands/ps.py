"""`crosspool ps`: the models of a running server and what they hold."""

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from crosspool.server_client import ServerClient
from crosspool.units import format_bytes

NARROW, STOWED = 80, 10  # columns: of a terminal, and of what lies in host memory


def run(client: ServerClient, *, as_json: bool, console: Console) -> None:
    stats = client.get("/stats")
    if as_json:
        print(json.dumps(stats["cards"]))
    else:
        console.print(models_table(stats, console.width))


def models_table(stats: dict[str, Any], width: int) -> Table:
    """One row a model: state, weights, KV, context, queue, running. A narrow terminal gets fewer columns.

    With host memory for KV there is one more: what lies there.
    """
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("MODEL", overflow="fold")
    table.add_column("STATE", no_wrap=True)
    has_tier = any(pool.get("host_frames_budget") for pool in stats["pools"])
    narrow = width < NARROW + (STOWED if has_tier else 0)
    held = ("KV USED", *(("STOWED",) if has_tier else ()), *(() if narrow else ("RESERVED", "CONTEXT")))
    for column in ("WEIGHTS", *held, "RUN", "WAIT", "TBT P50/P99"):
        table.add_column(column, justify="right", no_wrap=True)
    loads = {load["name"]: load for load in stats["models"]}
    frame_bytes = {pool["kv_rank"]: pool["frame_bytes"] for pool in stats["pools"]}
    for card in stats["cards"]:
        facts = card["crosspool"]
        load = loads.get(card["id"])
        frame = frame_bytes.get(facts["kv_rank"], 0)
        wide = (format_bytes(load["frames_reserved"] * frame) if load else "-", str(card["max_model_len"]))
        table.add_row(
            card["id"],
            _state(facts["state"], stats["model_health"].get(card["id"])),
            format_bytes(facts["weights_bytes"]),
            format_bytes(load["frames_used"] * frame) if load else "-",
            *((format_bytes(load["frames_stowed"] * frame) if load else "-",) if has_tier else ()),
            *(() if narrow else wide),
            str(load["num_prefilling"] + load["num_decoding"] + load["num_parked"]) if load else "-",
            str(load["num_queued"]) if load else "-",
            _tbt(stats["tbt_s"].get(card["id"])),
        )
    return table


def _state(state: str, health: dict[str, Any] | None) -> str:
    """What keeps a ready model from answering, where something does."""
    if state == "ready" and health is not None and health["status"] not in ("idle", "busy"):
        return str(health["status"])
    return state


def _tbt(recent: dict[str, float] | None) -> str:
    return f"{_ms(recent['p50'])}/{_ms(recent['p99'])} ms" if recent else "-"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}" if seconds < 0.1 else f"{1000 * seconds:.0f}"
