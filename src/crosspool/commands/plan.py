"""`crosspool plan`: read the input, plan, print; JSON, explanation and pictures where asked."""

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from crosspool.errors import CrossPoolError
from crosspool.planner.deployment import read_plan_input
from crosspool.planner.explain import explain, prefill_line
from crosspool.planner.plan import Plan
from crosspool.planner.plot import check_matplotlib, write_plots
from crosspool.planner.serve_config import write_serve_configs
from crosspool.simulator.simulated_plan import plan_as_told
from crosspool.units import format_bytes

TABLE_WIDTH = 110


def run(
    source: Path,
    *,
    output: Path | None,
    as_json: bool,
    explained: bool,
    plot_dir: Path | None,
    serve_dir: Path | None,
    console: Console,
) -> None:
    """Raises CrossPoolError, in one line, for wrong input and for what does not fit."""
    try:
        if plot_dir is not None:
            check_matplotlib()
        plan_input = read_plan_input(source)
        planned = plan_as_told(plan_input)
        if output is not None:
            output.write_text(planned.plan.to_json(), encoding="utf-8")
        written = write_plots(planned, plot_dir) if plot_dir is not None else []
        written += write_serve_configs(planned.plan, serve_dir) if serve_dir is not None else []
    except ValueError as error:
        raise CrossPoolError(str(error)) from None
    except OSError as error:
        raise CrossPoolError(f"cannot write {output}: {error.strerror or error}") from None
    if as_json:
        print(planned.plan.to_json(), end="")
    elif explained:
        for line in explain(planned.plan):
            print(line)
    else:
        show(planned.plan, console)
    for path in written:
        print(f"wrote {path}", file=sys.stderr)


def show(plan: Plan, console: Console) -> None:
    """The plan in short: one table a group, not squeezed into a narrow terminal."""
    wide = Console(file=console.file, width=max(TABLE_WIDTH, console.width))
    for group in plan.groups:
        prefill = f" + {len(group.prefill.ranks)} prefill" if group.prefill is not None else ""
        title = (
            f"{group.name}: {len(group.kv_ranks)} KV + {len(group.weights_ranks)} weights"
            f"{prefill} x {plan.gpu_kind}; "
            f"budget {format_bytes(group.budget_bytes)}, P{plan.quantile * 100:g} needs "
            f"{format_bytes(group.required_bytes)}, enough for {group.coverage:.2%} of moments"
        )
        console.print(title, highlight=False)
        table = Table(box=None, pad_edge=False)
        for column in ("model", "FFN", "KV B/token", "page", "floor", "ceiling", "context", "KV"):
            table.add_column(column, justify="left" if column in ("model", "KV") else "right", no_wrap=True)
        for model in group.models:
            table.add_row(
                model.name,
                format_bytes(sum(model.ffn_slice_bytes)),
                f"{model.kv_bytes_per_token:,}",
                f"{model.page_tokens}",
                f"{model.floor_pages}",
                f"{model.ceiling_pages:,}",
                f"{model.longest_context_tokens:,}",
                model.kv_parallelism,
            )
        wide.print(table)
        if group.prefill is not None:
            console.print(f"- {prefill_line(group.prefill)}", highlight=False, soft_wrap=True)
    if len(plan.groups) > 1:
        console.print(
            f"- grouped by {plan.placement.method}; proven within {plan.placement.gap:.1%} of the best", highlight=False
        )
    for note in plan.notes:
        console.print(f"- {note}", highlight=False)
