"""Commands that say how a deployment will do before there is one. Each imports what it needs when it is called."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def plan(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file with gpus:, models: and their load")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write the plan here, as JSON")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the plan as JSON")] = False,
    explained: Annotated[bool, typer.Option("--explain", help="print why each number is what it is")] = False,
    plot: Annotated[Path | None, typer.Option(help="folder for pictures of demand and contexts")] = None,
    serve_config: Annotated[Path | None, typer.Option(help="folder for files that crosspool serve reads")] = None,
) -> None:
    """Say before you buy what fits: KV budget, placement and context limits of many models on given GPUs."""
    from rich.console import Console

    from crosspool.commands.plan import run

    run(
        source,
        output=output,
        as_json=as_json,
        explained=explained,
        plot_dir=plot,
        serve_dir=serve_config,
        console=Console(),
    )


@app.command()
def simulate(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file as for `crosspool plan`")],
    plan: Annotated[Path | None, typer.Option(help="take this saved plan instead of planning FILE anew")] = None,
    mode: Annotated[str, typer.Option(help="steps (days) or exact (every put and wait; a minute or so)")] = "steps",
    layout: Annotated[str, typer.Option(help="crosspool, static or elastic")] = "crosspool",
    order: Annotated[str, typer.Option(help="priority, ticket, none, or streams (no order, GPUs shared)")] = "priority",
    seconds: Annotated[float, typer.Option(help="how long requests arrive")] = 60.0,
    start: Annotated[float, typer.Option(help="second of the workload to start at")] = 0.0,
    drain: Annotated[bool, typer.Option(help="go on until every request has ended")] = True,
    max_queue: Annotated[int, typer.Option(help="requests of a model that may wait")] = 64,
    host_us: Annotated[float, typer.Option(help="engine time between two steps of a lane")] = 0.0,
    ahead: Annotated[
        bool, typer.Option(help="hand out a lane's next decode step while one runs, as the server does (mode exact)")
    ] = False,
    prompts_wait: Annotated[
        int, typer.Option(help="prompts wait for decode steps of up to so many rows; on GPUs 32 (mode exact)")
    ] = 0,
    patience_us: Annotated[
        float,
        typer.Option(
            help="what a layer of a prompt may take before it outranks decode; on GPUs 1000 "
            "(mode exact, or shared GPUs)  [for ever]",
            show_default=False,
        ),
    ] = float("inf"),
    patience_token_us: Annotated[float, typer.Option(help="added to that for each token; on GPUs 0.75")] = 0.0,
    prompts_share: Annotated[
        bool,
        typer.Option(help="prompts run beside decode, not in turns, as long as their patience allows (mode exact)"),
    ] = False,
    beside_share: Annotated[
        float, typer.Option(help="share of every FFN that a weights rank on the KV GPU holds, such as 0.25")
    ] = 0.0,
    pass_rows: Annotated[
        str, typer.Option(help="numbers of rows of decode's passes, ascending; on GPUs 1,2,3,4,6,8,12,16,20,24,32")
    ] = "",
    measured: Annotated[
        list[Path] | None, typer.Option(help="measured stage times: kept results or a JSON table; repeat for more")
    ] = None,
    seed: Annotated[int, typer.Option(help="the same seed gives the same run")] = 0,
    chrome: Annotated[Path | None, typer.Option(help="write a Chrome trace here (mode exact)")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write the report here, as JSON")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
) -> None:
    """Say how a deployment will behave: its workload through the real engine on a virtual clock."""
    from rich.console import Console

    from crosspool.commands.simulate import SimulateFiles, run

    files = SimulateFiles(source=source, plan=plan, measured=tuple(measured or ()), output=output, chrome=chrome)
    settings: dict[str, object] = {
        "mode": mode,
        "layout": layout,
        "order": order,
        "duration_s": seconds,
        "start_s": start,
        "drain": drain,
        "max_queue": max_queue,
        "host_s": host_us * 1e-6,
        "is_ahead": ahead,
        "prompts_wait": prompts_wait,
        "patience_s": patience_us * 1e-6,
        "patience_token_s": patience_token_us * 1e-6,
        "prompts_share": prompts_share,
        "beside_share": beside_share,
        "pass_rows": pass_rows,
        "seed": seed,
    }
    run(files, settings, as_json=as_json, console=Console())
