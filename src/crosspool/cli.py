"""The command line. Each command imports what it needs when it is called, so that `crosspool --help` is quick."""

import errno
import io
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from crosspool import cli_clients, cli_planning
from crosspool.commands import bench
from crosspool.commands.help import Commands, ServeCommand
from crosspool.errors import CrossPoolError

app = typer.Typer(
    name="crosspool",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(cli_clients.app)
app.add_typer(cli_planning.app)
app.add_typer(bench.app, name="bench")

Words = list[str] | None


def main() -> None:
    """Entry point of `crosspool`. What a user can fix is one line on standard error and exit code 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # answers and pictures may hold what a terminal has no character for
    try:
        app()
    except CrossPoolError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print("error: cannot write any more: no space is left on the device", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _show_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def crosspool(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Serve many Mixture-of-Experts models from two memory pools: one for weights, one for KV cache."""


@app.command(cls=ServeCommand)
def serve(
    models: Annotated[Words, typer.Argument(metavar="MODEL", show_default=False)] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with any of these settings and `models:`")] = None,
    plan: Annotated[Path | None, typer.Option(help="serve as planned: JSON of `crosspool plan --output`")] = None,
    plan_group: Annotated[str | None, typer.Option(help="which group of the plan; needed if it has several")] = None,
    check: Annotated[bool, typer.Option("--check", help="look at settings and model files, start nothing")] = False,
    host: Annotated[str | None, typer.Option(help="address to listen on  [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="port to listen on; 0: any free one  [8000]")] = None,
    listen_fd: Annotated[
        int | None, typer.Option(help="descriptor of a listening socket that is handed over, in place of both  [none]")
    ] = None,
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
        str | None, typer.Option(help="host memory for cached KV that has to make room  [0]")
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
    prefill_gpus: Annotated[
        str | None, typer.Option(help="GPU of each prefill rank (cuda), such as 1  [the last ones]")
    ] = None,
    prefill_pool_bytes: Annotated[
        str | None, typer.Option(help="whole models in turn on each prefill rank's GPU  [two of the largest]")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs that the ranks share in turn (cuda)  [one a rank]")] = None,
    transport: Annotated[
        str | None, typer.Option(help="between GPUs: auto, peer, host or nvshmem memory (cuda)  [auto]")
    ] = None,
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
    layout: Annotated[
        str | None,
        typer.Option(help="processes (one a rank), inprocess, or a baseline: static, elastic  [processes]"),
    ] = None,
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
    prefill_share: Annotated[
        float | None, typer.Option(help="part of a GPU that prompts keep to beside decode (cuda)  [0.7]")
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

    run(models or [], served_model_name or [], config, flags, plan, plan_group, only_check=check)


SERVE_ARGUMENTS = ("models", "served_model_name", "config", "plan", "plan_group", "check")


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
