"""`crosspool top`: both pools by model, the lanes, the queues and the time between tokens, live."""

import json
import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from crosspool.commands.ps import models_table
from crosspool.errors import CrossPoolError
from crosspool.server_client import ServerClient
from crosspool.units import format_bytes

COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
BAR_WIDTH = 44
LABEL_WIDTH = 36  # what stands left and right of a bar, at most


def run(client: ServerClient, *, interval_s: float, once: bool, as_json: bool, console: Console) -> None:
    """Redraw every `interval_s` until Ctrl-C, or show the present moment `once`, as where no terminal looks on."""
    stats = client.get("/stats")
    if as_json:
        print(json.dumps(stats))
        return
    if once or not console.is_terminal:
        console.print(view(stats, console.width))
        return
    with Live(view(stats, console.width), console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                time.sleep(interval_s)
                live.update(view(client.get("/stats"), console.width), refresh=True)
            except CrossPoolError as error:  # the server may be on its way back
                live.update(Text(str(error), style="red"), refresh=True)
            except KeyboardInterrupt:
                return


def view(stats: dict[str, Any], width: int) -> RenderableType:
    health = stats["health"]
    state = "draining" if stats["draining"] else health["status"]
    head = Text.assemble(
        ("CrossPool ", "bold"),
        f"{stats['version']}  ",
        (state, "bold green" if state in ("idle", "busy") else "bold red"),
    )
    if health.get("detail"):
        head.append(f"  {health['detail']}")
    bar_width = max(8, min(BAR_WIDTH, width - LABEL_WIDTH))
    return Group(
        head,
        Text(),
        *_kv_bars(stats, bar_width),
        _weights_bar(stats, bar_width),
        Text(),
        models_table(stats, width),
        Text(),
        _lanes(stats),
    )


def _kv_bars(stats: dict[str, Any], width: int) -> list[Text]:
    """One bar for each KV rank: frames of each model, then what is free."""
    bars = []
    for pool in stats["pools"]:
        rank = pool["kv_rank"]
        own = [(load["name"], load["frames_by_rank"].get(rank)) for load in stats["models"]]
        shares = [(name, frames["used"] + frames["reserved"]) for name, frames in own if frames is not None]
        taken = pool["frames_used"] + pool["frames_reserved"]
        frame = pool["frame_bytes"]
        label = f"{format_bytes(taken * frame)} of {format_bytes(pool['frames_budget'] * frame)}"
        bars.append(_bar(f"KV {pool['kv_rank']}", shares, pool["frames_budget"], label, stats, width))
    return bars


def _weights_bar(stats: dict[str, Any], width: int) -> Text:
    """FFN bytes of each model over the weights ranks; the pool holds just what the models need."""
    shares = []
    for card in stats["cards"]:
        facts = card["crosspool"]
        shares.append((card["id"], sum(facts["bytes_by_rank"].get(rank, 0) for rank in facts["weights_ranks"])))
    total = sum(size for _, size in shares)
    return _bar("weights", shares, max(total, 1), format_bytes(total), stats, width)


def _bar(name: str, shares: list[tuple[str, int]], total: int, label: str, stats: dict[str, Any], width: int) -> Text:
    order = [card["id"] for card in stats["cards"]]
    bar = Text(f"{name:<9}")
    filled = 0
    for model, size in shares:
        cells = round(width * size / total)
        filled += cells
        colour = COLOURS[order.index(model) % len(COLOURS)] if model in order else "white"
        bar.append("█" * cells, style=colour)
    bar.append("·" * max(0, width - filled), style="dim")
    bar.append(f"  {label}")
    return bar


def _lanes(stats: dict[str, Any]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("LANE", "PHASE", "STATE", "MODEL", "SEQS", "STEP"):
        table.add_column(column, justify="right" if column in ("SEQS", "STEP") else "left")
    for lane in stats["lanes"]:
        table.add_row(
            str(lane["lane"]),
            lane["phase"],
            lane["state"],
            lane["model"] or "-",
            str(lane["num_seqs"]),
            str(lane["step_seq"]),
        )
    return table
