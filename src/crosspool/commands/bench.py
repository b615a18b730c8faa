"""`crosspool bench` and `crosspool bench compare`: the flags. What they do is in `bench/`, imported when called."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from crosspool.commands.help import BenchCommands
from crosspool.errors import CrossPoolError


class BenchFlags(BenchCommands):
    """Takes several limits behind one `--goodput`, as vLLM's flag does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, each_with_flag(args, "--goodput"))


app = typer.Typer(cls=BenchFlags, no_args_is_help=False, pretty_exceptions_enable=False)
Words = list[str] | None
LOCAL = "http://localhost:8000"
OF_MODELS = "VALUE, or MODEL=VALUE for one; repeat for more"


def each_with_flag(args: Sequence[str], flag: str) -> list[str]:
    """`flag a b` as `flag a flag b`, up to the next word that begins with a dash."""
    found: list[str] = []
    is_behind = False
    for word in args:
        if is_behind and not word.startswith("-") and found[-1] != flag:
            found.append(flag)
        is_behind = word == flag or (is_behind and not word.startswith("-"))
        found.append(word)
    return found


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    base_url: Annotated[
        Words,
        typer.Option(
            help=f"any OpenAI-compatible server; default {LOCAL}. {OF_MODELS}",
            envvar="CROSSPOOL_BASE_URL",
            show_default=False,
        ),
    ] = None,
    endpoint: Annotated[str, typer.Option(help="/v1/completions or /v1/chat/completions")] = "/v1/completions",
    api_key: Annotated[str | None, typer.Option(help="the server's key", envvar="CROSSPOOL_API_KEY")] = None,
    models: Annotated[
        Words,
        typer.Option(
            "--model", help="a served name; repeat for more; default: all that /v1/models lists", show_default=False
        ),
    ] = None,
    request_rate: Annotated[
        Words,
        typer.Option(help=f"requests/s of each model, inf: all at once; default inf. {OF_MODELS}", show_default=False),
    ] = None,
    burstiness: Annotated[float, typer.Option(help="1: Poisson; below: bursts (shape of Gamma intervals)")] = 1.0,
    ramp: Annotated[
        str | None, typer.Option("--ramp-up-strategy", help="linear or exponential, over --duration")
    ] = None,
    ramp_start_rps: Annotated[
        float | None, typer.Option("--ramp-up-start-rps", help="requests/s of each model at the start")
    ] = None,
    ramp_end_rps: Annotated[float | None, typer.Option("--ramp-up-end-rps", help="and at the end")] = None,
    max_concurrency: Annotated[int | None, typer.Option(help="requests under way at once: a closed loop")] = None,
    num_prompts: Annotated[
        int | None, typer.Option(help="requests of each model; default 100 without a duration", show_default=False)
    ] = None,
    duration_s: Annotated[float | None, typer.Option("--duration", help="seconds in which requests are sent")] = None,
    input_len: Annotated[
        Words, typer.Option(help=f"prompt tokens, or MEAN~CV; default 128. {OF_MODELS}", show_default=False)
    ] = None,
    output_len: Annotated[
        Words, typer.Option(help=f"answer tokens, or MEAN~CV; default 64. {OF_MODELS}", show_default=False)
    ] = None,
    lengths: Annotated[Words, typer.Option(help=f"table of lengths to draw from. {OF_MODELS}")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="cut prompt + answer at so many tokens")] = None,
    trace: Annotated[Path | None, typer.Option(help="replay a recorded trace instead of drawing requests")] = None,
    trace_format: Annotated[str, typer.Option(help="plain, azure, mooncake, bench or auto")] = "auto",
    trace_model: Annotated[str | None, typer.Option(help="model of a trace that names none")] = None,
    trace_names: Annotated[
        Words, typer.Option("--trace-name", help="OLD=NEW: a model's name in the trace, and the served one")
    ] = None,
    trace_speed: Annotated[float, typer.Option(help="2: arrivals twice as fast")] = 1.0,
    start_s: Annotated[
        float, typer.Option("--trace-start", help="seconds into the trace, or into ServeGen's rates")
    ] = 0.0,
    skips_unserved: Annotated[
        bool, typer.Option("--trace-skip-unserved", help="leave out the trace's requests of other models")
    ] = False,
    length_scale: Annotated[float, typer.Option(help="the trace's token counts times this")] = 1.0,
    servegen_rates: Annotated[Path | None, typer.Option(help="rates of ServeGen clients")] = None,
    servegen_lengths: Annotated[Path | None, typer.Option(help="lengths of ServeGen clients")] = None,
    servegen_clients: Annotated[
        Words, typer.Option("--servegen-client", help="MODEL=CLIENT: whose requests a model gets")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="answers are as long as asked for")] = True,
    temperature: Annotated[float | None, typer.Option(help="of every request")] = None,
    vocab_size: Annotated[int, typer.Option(help="prompt token ids are drawn below this")] = 1000,
    tokenizer: Annotated[
        Path | None, typer.Option(help="model directory: chat prompts of as many tokens, ids of its whole vocabulary")
    ] = None,
    extra_body: Annotated[str | None, typer.Option(help="JSON object of more fields of every request")] = None,
    seed: Annotated[int, typer.Option(help="the same seed sends the same requests")] = 0,
    num_warmups: Annotated[int, typer.Option(min=0, help="requests of each model before, not counted")] = 1,
    timeout_s: Annotated[float, typer.Option("--timeout", help="seconds after which a request has failed")] = 600.0,
    num_processes: Annotated[int, typer.Option("--client-processes", min=1, help="processes that send and read")] = 1,
    metrics: Annotated[str, typer.Option("--percentile-metrics", help="which metrics")] = "ttft,tpot,itl,e2el",
    percentiles: Annotated[str, typer.Option("--metric-percentiles", help="which percentiles")] = "50,95,99",
    goodput: Annotated[Words, typer.Option(help="limits such as ttft:500 tbt:100 (or tpot, e2el; ms)")] = None,
    saves: Annotated[bool, typer.Option("--save-result", help="write the result as JSON")] = False,
    detailed: Annotated[bool, typer.Option("--save-detailed", help="with lists of every request")] = False,
    reports: Annotated[bool, typer.Option("--report", help="also Markdown, HTML and pictures")] = False,
    result_dir: Annotated[Path, typer.Option(help="where files go")] = Path(),
    result_filename: Annotated[str | None, typer.Option(help="name of the JSON file")] = None,
    label: Annotated[str | None, typer.Option(help="name of this run, in files and reports")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Put load on a running server, ours or another, and say what its users see. Flags as in `vllm bench serve`."""
    given = {**locals(), "saves": saves or detailed or reports}
    if context.invoked_subcommand is not None:
        return
    from crosspool.bench.run import run
    from crosspool.bench.settings import BenchSettings

    told: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if name not in ("context", "as_json") and value not in (None, [])
    }
    try:
        settings = BenchSettings(**{"base_url": (LOCAL,), **told})
        run(settings, as_json=as_json)
    except ValueError as error:
        raise CrossPoolError(str(error)) from None


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="result of --save-result")],
    second: Annotated[Path, typer.Argument(help="another one")],
    as_json: Annotated[bool, typer.Option("--json", help="print the differences as JSON")] = False,
) -> None:
    """Say in which figures the second result differs from the first by more than chance."""
    import json
    from dataclasses import asdict

    from rich.console import Console

    from crosspool.bench.compare import differences, unlike_loads
    from crosspool.bench.saved import read_result
    from crosspool.bench.table import show_differences

    try:
        results = read_result(first), read_result(second)
        found = differences(*results)
    except ValueError as error:
        raise CrossPoolError(str(error)) from None
    if as_json:
        print(json.dumps([{**asdict(item), "ratio": item.ratio} for item in found], indent=1))
    else:
        show_differences(found, unlike_loads(*results), Console())
