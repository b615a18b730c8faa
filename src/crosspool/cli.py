"""The command line. Each command imports what it needs when it is called, so that `crosspool --help` is quick."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from crosspool.commands import bench
from crosspool.commands.serve_help import ServeCommand
from crosspool.errors import CrossPoolError

app = typer.Typer(
    name="crosspool",
    help="Serve many Mixture-of-Experts models from two memory pools: one for weights, one for KV cache.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(bench.app, name="bench")

BaseUrl = Annotated[str, typer.Option(help="where the server is", envvar="CROSSPOOL_BASE_URL")]
ClientKey = Annotated[str | None, typer.Option("--api-key", help="the server's key", envvar="CROSSPOOL_API_KEY")]
AdminKey = Annotated[
    str | None,
    typer.Option("--admin-api-key", "--api-key", help="the server's admin key", envvar="CROSSPOOL_ADMIN_API_KEY"),
]
Words = list[str] | None
LOCAL = "http://localhost:8000"


def main() -> None:
    """Entry point of `crosspool`. What a user can fix is one line on standard error and exit code 1."""
    try:
        app()
    except CrossPoolError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


@app.command(cls=ServeCommand)
def serve(
    models: Annotated[Words, typer.Argument(metavar="MODEL", show_default=False)] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with any of these settings and `models:`")] = None,
    plan: Annotated[Path | None, typer.Option(help="serve as planned: JSON of `crosspool plan --output`")] = None,
    plan_group: Annotated[str | None, typer.Option(help="which group of the plan; needed if it has several")] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on  [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="port to listen on; 0: any free one  [8000]")] = None,
    api_key: Annotated[
        Words, typer.Option(help="key that requests must carry; repeat for more", show_default=False)
    ] = None,
    admin_api_key: Annotated[Words, typer.Option(help="key of the admin routes", show_default=False)] = None,
    ssl_certfile: Annotated[str | None, typer.Option(help="certificate in PEM; with a key the server is HTTPS")] = None,
    ssl_keyfile: Annotated[str | None, typer.Option(help="key in PEM")] = None,
    served_model_name: Annotated[Words, typer.Option(help="name (and aliases) of the model, or one for each")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="context limit: tokens of prompt + output")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="sequences of a model that run at once  [32]")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="prompt tokens of a prefill step  [512; 8192 with cuda, one KV rank]")
    ] = None,
    max_queue: Annotated[int | None, typer.Option(help="sequences of a model that may wait  [64]")] = None,
    max_queue_per_key: Annotated[int | None, typer.Option(help="of them, those of one API key")] = None,
    queue_timeout: Annotated[float | None, typer.Option(help="seconds a request may wait; then 408")] = None,
    kv_pool_bytes: Annotated[str | None, typer.Option(help="KV pool of all models, such as 4GiB  [256MiB]")] = None,
    host_pool_bytes: Annotated[
        str | None, typer.Option(help="host memory for cached KV that has to make room (CPUs)  [0]")
    ] = None,
    frame_bytes: Annotated[str | None, typer.Option(help="granularity of KV memory  [2MiB]")] = None,
    kv_ranks: Annotated[int | None, typer.Option(help="ranks that hold KV, with kv_pool_bytes each  [1]")] = None,
    kv_backing: Annotated[
        str | None, typer.Option(help="arena, or vmm: KV memory mapped for each model ahead of need  [arena]")
    ] = None,
    kv_split: Annotated[
        str | None, typer.Option(help="a model's KV over KV ranks: heads, tokens, one or auto  [auto]")
    ] = None,
    weights_ranks: Annotated[int | None, typer.Option(help="ranks that every FFN is sliced over  [1]")] = None,
    weights_shares: Annotated[
        str | None, typer.Option(help="relative width of each rank's slices, such as 3,1  [equal]")
    ] = None,
    prefill: Annotated[
        str | None, typer.Option(help="inline in the pools, or dedicated: on ranks of its own  [inline]")
    ] = None,
    prefill_ranks: Annotated[int | None, typer.Option(help="ranks that compute prompts, with dedicated  [1]")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs that the ranks share in turn (cuda)  [one a rank]")] = None,
    backend: Annotated[str | None, typer.Option(help="numpy, or cuda with a GPU for each rank  [numpy]")] = None,
    weights: Annotated[
        str | None, typer.Option(help="checkpoint, or random ones of the same shapes (cuda)  [checkpoint]")
    ] = None,
    control: Annotated[
        str | None, typer.Option(help="what drives decode with cuda: host, graphs or resident  [graphs]")
    ] = None,
    steps_ahead: Annotated[
        str | None, typer.Option(help="where a lane's next decode step waits (cuda): host or device  [host]")
    ] = None,
    pipeline: Annotated[
        str | None, typer.Option(help="off: one decode batch in flight, the pools take turns  [on]")
    ] = None,
    decode_steps: Annotated[
        int | None, typer.Option(help="decode steps that a batch may take without the engine  [1]")
    ] = None,
    order: Annotated[
        str | None, typer.Option(help="of lanes' ready segments: none, ticket or priority  [priority]")
    ] = None,
    route: Annotated[str | None, typer.Option(help="the pool that chooses experts: ffn or kv  [ffn]")] = None,
    layout: Annotated[str | None, typer.Option(help="processes (one a rank) or inprocess  [processes]")] = None,
    baseline: Annotated[
        str | None, typer.Option(help="static or elastic: whole models without pools, to measure against")
    ] = None,
    admission: Annotated[str | None, typer.Option(help="reserve or forecast  [reserve]")] = None,
    enable_prefix_caching: Annotated[
        bool | None, typer.Option(help="keep full pages for later prompts that begin alike  [on]", show_default=False)
    ] = None,
    batch_invariant: Annotated[
        bool | None,
        typer.Option(help="prompts run alone, so that no answer depends on others  [off]", show_default=False),
    ] = None,
    recovery_timeout: Annotated[float | None, typer.Option(help="seconds to wait for a lost worker  [60]")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, float16 or bfloat16  [auto]")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of requests that give none")] = None,
    chat_template: Annotated[str | None, typer.Option(help="file with a Jinja chat template")] = None,
    download_dir: Annotated[str | None, typer.Option(help="where Hugging Face ids are stored")] = None,
    allowed_origins: Annotated[Words, typer.Option(help="origin that browsers may call from; repeat for more")] = None,
    root_path: Annotated[str | None, typer.Option(help="path prefix that a proxy in front strips")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning, error or critical  [info]")] = None,
    log_format: Annotated[str | None, typer.Option(help="json, text or auto  [auto]")] = None,
    otlp_traces_endpoint: Annotated[str | None, typer.Option(help="URL that spans of requests are sent to")] = None,
    metrics_compat: Annotated[str | None, typer.Option(help="vllm: the common metrics also under its names")] = None,
    disable_access_log_for_endpoints: Annotated[
        str | None, typer.Option(help="paths left out of the access log, separated by commas")
    ] = None,
    sse_keep_alive_interval: Annotated[
        float | None, typer.Option(help="seconds between SSE comment lines  [10]")
    ] = None,
    shutdown_timeout: Annotated[float | None, typer.Option(help="seconds to drain in after SIGTERM  [30]")] = None,
) -> None:
    """Serve models behind the OpenAI API; with no model named, the demo models.

    MODEL is a Hugging Face model directory or id, or NAME=DIR to serve it as NAME. Every option may also stand in the
    YAML file, or in the environment as CROSSPOOL_NAME.
    """
    given = dict(locals())
    flags = {key: value for key, value in given.items() if key not in SERVE_ARGUMENTS and value not in (None, [])}

    from crosspool.commands.serve import run

    run(models or [], served_model_name or [], config, flags, plan, plan_group)


SERVE_ARGUMENTS = ("models", "served_model_name", "config", "plan", "plan_group")


@app.command()
def generate(
    directories: Annotated[list[str], typer.Argument(metavar="DIR", help="model directories (or NAME=DIR)")],
    prompts: Annotated[Path, typer.Option(help="JSON lines, or lines of model<TAB>prompt; - reads standard input")],
    max_tokens: Annotated[int, typer.Option(help="tokens to generate for each prompt")] = 64,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the model's own")] = None,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same answers")] = None,
    backend: Annotated[str, typer.Option(help="numpy, or cuda with a GPU for each rank")] = "numpy",
    layout: Annotated[str, typer.Option(help="processes or inprocess")] = "processes",
    kv_pool_bytes: Annotated[str, typer.Option(help="KV pool of all models")] = "256MiB",
    frame_bytes: Annotated[str, typer.Option(help="granularity of KV memory")] = "2MiB",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON line for each answer, as it ends")] = False,
) -> None:
    """Answer prompts with several models at once, from two pools, without HTTP."""
    from crosspool.commands.generate import run

    fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    flags = {"backend": backend, "layout": layout, "kv_pool_bytes": kv_pool_bytes, "frame_bytes": frame_bytes}
    run(directories, prompts, fields, flags, as_json=as_json)


@app.command()
def demo(
    host: Annotated[str, typer.Option(help="address of the demo's server")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="its port  [8000, or any free one]")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="leave the server up afterwards, until Ctrl-C")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the figures and answers as JSON")] = False,
    seed: Annotated[int, typer.Option(help="the same seed gives the same answers")] = 2026,
) -> None:
    """Three small models from two pools, asked over HTTP at once: lanes, shared pages, answers and times."""
    from crosspool.demo.run import run_demo

    run_demo(host=host, port=port, keep=keep, as_json=as_json, seed=seed)


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
    patience_us: Annotated[
        float, typer.Option(help="how long a prompt's segment steps aside for decode; on GPUs about 1000  [for ever]")
    ] = float("inf"),
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
        "patience_s": patience_us * 1e-6,
        "seed": seed,
    }
    run(files, settings, as_json=as_json, console=Console())


@app.command()
def chat(
    model: Annotated[str | None, typer.Argument(help="a served name; may be left out where one is served")] = None,
    quick: Annotated[str | None, typer.Option("--quick", "-q", help="ask this once and leave")] = None,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="tokens to generate at most")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy")] = None,
    base_url: BaseUrl = LOCAL,
    api_key: ClientKey = None,
) -> None:
    """Talk to a model of a running server."""
    from crosspool.commands.chat import run
    from crosspool.commands.http import ServerClient

    options = {"max_tokens": max_tokens, "temperature": temperature}
    run(ServerClient(base_url, api_key), model, quick=quick, system=system, options=options)


@app.command()
def ps(
    base_url: BaseUrl = LOCAL,
    api_key: ClientKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="the same as JSON")] = False,
) -> None:
    """List the models of a running server and what they hold."""
    from rich.console import Console

    from crosspool.commands.http import ServerClient
    from crosspool.commands.ps import run

    run(ServerClient(base_url, api_key), as_json=as_json, console=Console())


@app.command()
def load(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="directory or Hugging Face id, or NAME=DIR")],
    alias: Annotated[Words, typer.Option(help="another name that answers as it; repeat for more")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="context limit: tokens of prompt + output")] = None,
    chat_template: Annotated[str | None, typer.Option(help="file with a Jinja chat template, on the server")] = None,
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit of a Hugging Face id")] = None,
    wait: Annotated[bool, typer.Option(help="until it is ready")] = True,
    base_url: BaseUrl = LOCAL,
    api_key: AdminKey = None,
) -> None:
    """Load a model into a running server, under the last part of its directory's name. The others answer meanwhile."""
    from rich.console import Console

    from crosspool.commands import models
    from crosspool.commands.http import ServerClient

    fields = {
        "aliases": alias,
        "max_model_len": max_model_len,
        "chat_template": chat_template,
        "revision": revision,
    }
    models.load(ServerClient(base_url, api_key), model, fields, waits=wait, console=Console())


@app.command()
def unload(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="a served name")],
    drain: Annotated[bool, typer.Option(help="let accepted requests end; without, they end with an error")] = True,
    wait: Annotated[bool, typer.Option(help="until its memory is free")] = True,
    base_url: BaseUrl = LOCAL,
    api_key: AdminKey = None,
) -> None:
    """Take a model from a running server and give its memory back. New requests for it are refused at once."""
    from rich.console import Console

    from crosspool.commands import models
    from crosspool.commands.http import ServerClient

    models.unload(ServerClient(base_url, api_key), model, drains=drain, waits=wait, console=Console())


@app.command()
def limits(
    model: Annotated[str | None, typer.Argument(help="a served name, for --floor and --ceiling")] = None,
    floor: Annotated[str | None, typer.Option(help="kept for MODEL whatever others ask for, such as 1GiB")] = None,
    ceiling: Annotated[str | None, typer.Option(help="the most MODEL may hold, or none")] = None,
    budget: Annotated[str | None, typer.Option(help="what all models may hold in each KV rank's pool")] = None,
    base_url: BaseUrl = LOCAL,
    api_key: AdminKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="the same as JSON")] = False,
) -> None:
    """Show what models may hold in the KV pool of a running server, or change it. Live requests are not touched."""
    from rich.console import Console

    from crosspool.commands.http import ServerClient
    from crosspool.commands.limits import run

    client = ServerClient(base_url, api_key)
    run(client, model, floor=floor, ceiling=ceiling, budget=budget, as_json=as_json, console=Console())


@app.command()
def top(
    base_url: BaseUrl = LOCAL,
    api_key: ClientKey = None,
    interval: Annotated[float, typer.Option(min=0.1, help="seconds between two looks")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="show the present moment and leave")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the present moment as JSON")] = False,
) -> None:
    """Watch both pools, the lanes and the queues of a running server."""
    from rich.console import Console

    from crosspool.commands.http import ServerClient
    from crosspool.commands.top import run

    client = ServerClient(base_url, api_key)
    run(client, interval_s=interval, once=once, as_json=as_json, console=Console())


@app.command("collect-env")
def collect_env(as_json: Annotated[bool, typer.Option("--json", help="the same as JSON")] = False) -> None:
    """Print versions, memory and GPUs, for a bug report."""
    from crosspool.commands.collect_env import run

    run(as_json=as_json)


@app.command()
def version() -> None:
    """Print the version."""
    from crosspool import __version__

    print(__version__)
