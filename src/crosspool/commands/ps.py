"""`crosspool ps`: the models of a running server and what they hold."""

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from crosspool.commands.http import ServerClient
from crosspool.units import format_bytes


def run(client: ServerClient, *, as_json: bool, console: Console) -> None:
    stats = client.get("/stats")
    if as_json:
        print(json.dumps(stats["cards"]))
    else:
        console.print(models_table(stats))


def models_table(stats: dict[str, Any]) -> Table:
    """One row a model: state, weights, KV, context, queue, running."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("MODEL", "STATE"):
        table.add_column(column, no_wrap=True)
    for column in ("WEIGHTS", "KV USED", "RESERVED", "CONTEXT", "RUN", "WAIT", "TBT P50/P99"):
        table.add_column(column, justify="right", no_wrap=True)
    loads = {load["name"]: load for load in stats["models"]}
    frame_bytes = {pool["kv_rank"]: pool["frame_bytes"] for pool in stats["pools"]}
    for card in stats["cards"]:
        facts = card["crosspool"]
        load = loads.get(card["id"])
        frame = frame_bytes.get(facts["kv_rank"], 0)
        table.add_row(
            card["id"],
            facts["state"],
            format_bytes(facts["weights_bytes"]),
            format_bytes(load["frames_used"] * frame) if load else "-",
            format_bytes(load["frames_reserved"] * frame) if load else "-",
            str(card["max_model_len"]),
            str(load["num_prefilling"] + load["num_decoding"] + load["num_parked"]) if load else "-",
            str(load["num_queued"]) if load else "-",
            _tbt(stats["tbt_s"].get(card["id"])),
        )
    return table


def _tbt(recent: dict[str, float] | None) -> str:
    return f"{1000 * recent['p50']:.1f}/{1000 * recent['p99']:.1f} ms" if recent else "-"
