"""`crosspool bench` and `crosspool bench compare`: the flags. What they do is in `bench/`, imported when called."""

from pathlib import Path
from typing import Annotated

import typer

from crosspool.commands.help import BenchCommands
from crosspool.errors import CrossPoolError

app = typer.Typer(cls=BenchCommands, no_args_is_help=False, pretty_exceptions_enable=False)
Words = list[str] | None
LOCAL = "http://localhost:8000"
OF_MODELS = "VALUE, or MODEL=VALUE for one; repeat for more"


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
    model: Annotated[
        Words,
        typer.Option(help="a served name; repeat for more; default: all that /v1/models lists", show_default=False),
    ] = None,
    request_rate: Annotated[
        Words,
        typer.Option(help=f"requests/s of each model, inf: all at once; default inf. {OF_MODELS}", show_default=False),
    ] = None,
    burstiness: Annotated[float, typer.Option(help="1: Poisson; below: bursts (shape of Gamma intervals)")] = 1.0,
    ramp_up_strategy: Annotated[str | None, typer.Option(help="linear or exponential, over --duration")] = None,
    ramp_up_start_rps: Annotated[float | None, typer.Option(help="requests/s of each model at the start")] = None,
    ramp_up_end_rps: Annotated[float | None, typer.Option(help="and at the end")] = None,
    max_concurrency: Annotated[int | None, typer.Option(help="requests under way at once: a closed loop")] = None,
    num_prompts: Annotated[
        int | None, typer.Option(help="requests of each model; default 100 without a duration", show_default=False)
    ] = None,
    duration: Annotated[float | None, typer.Option(help="seconds in which requests are sent")] = None,
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
    trace_name: Annotated[Words, typer.Option(help="OLD=NEW: a model's name in the trace, and the served one")] = None,
    trace_speed: Annotated[float, typer.Option(help="2: arrivals twice as fast")] = 1.0,
    trace_start: Annotated[float, typer.Option(help="seconds into the trace, or into ServeGen's rates")] = 0.0,
    trace_skip_unserved: Annotated[
        bool, typer.Option("--trace-skip-unserved", help="leave out the trace's requests of other models")
    ] = False,
    length_scale: Annotated[float, typer.Option(help="the trace's token counts times this")] = 1.0,
    servegen_rates: Annotated[Path | None, typer.Option(help="rates of ServeGen clients")] = None,
    servegen_lengths: Annotated[Path | None, typer.Option(help="lengths of ServeGen clients")] = None,
    servegen_client: Annotated[Words, typer.Option(help="MODEL=CLIENT: whose requests a model gets")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="answers are as long as asked for")] = True,
    temperature: Annotated[float | None, typer.Option(help="of every request")] = None,
    vocab_size: Annotated[int, typer.Option(help="prompt token ids are drawn below this")] = 1000,
    tokenizer: Annotated[
        Path | None, typer.Option(help="model directory: chat prompts of as many tokens, ids of its whole vocabulary")
    ] = None,
    extra_body: Annotated[str | None, typer.Option(help="JSON object of more fields of every request")] = None,
    seed: Annotated[int, typer.Option(help="the same seed sends the same requests")] = 0,
    num_warmups: Annotated[int, typer.Option(min=0, help="requests of each model before, not counted")] = 1,
    timeout: Annotated[float, typer.Option(help="seconds after which a request has failed")] = 600.0,
    client_processes: Annotated[int, typer.Option(min=1, help="processes that send and read")] = 1,
    percentile_metrics: Annotated[str, typer.Option(help="which metrics")] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="which percentiles")] = "50,95,99",
    goodput: Annotated[Words, typer.Option(help="limits such as ttft:500 (ttft, tbt, tpot, e2el; ms)")] = None,
    save_result: Annotated[bool, typer.Option("--save-result", help="write the result as JSON")] = False,
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="with lists of every request")] = False,
    report: Annotated[bool, typer.Option("--report", help="also Markdown, HTML and pictures")] = False,
    result_dir: Annotated[Path, typer.Option(help="where files go")] = Path(),
    result_filename: Annotated[str | None, typer.Option(help="name of the JSON file")] = None,
    label: Annotated[str | None, typer.Option(help="name of this run, in files and reports")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Put load on a running server, ours or another, and say what its users see. Flags as in `vllm bench serve`."""
    if context.invoked_subcommand is not None:
        return
    from crosspool.bench.run import run
    from crosspool.bench.settings import BenchSettings

    try:
        settings = BenchSettings(
            base_url=tuple(base_url or (LOCAL,)),
            endpoint=endpoint,
            api_key=api_key,
            models=tuple(model or ()),
            request_rate=tuple(request_rate or ("inf",)),
            burstiness=burstiness,
            ramp=ramp_up_strategy,
            ramp_start_rps=ramp_up_start_rps,
            ramp_end_rps=ramp_up_end_rps,
            max_concurrency=max_concurrency,
            num_prompts=num_prompts,
            duration_s=duration,
            input_len=tuple(input_len or ("128",)),
            output_len=tuple(output_len or ("64",)),
            lengths=tuple(lengths or ()),
            max_model_len=max_model_len,
            trace=trace,
            trace_format=trace_format,
            trace_model=trace_model,
            trace_names=tuple(trace_name or ()),
            trace_speed=trace_speed,
            start_s=trace_start,
            skips_unserved=trace_skip_unserved,
            length_scale=length_scale,
            servegen_rates=servegen_rates,
            servegen_lengths=servegen_lengths,
            servegen_clients=tuple(servegen_client or ()),
            ignore_eos=ignore_eos,
            temperature=temperature,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            extra_body=extra_body,
            seed=seed,
            num_warmups=num_warmups,
            timeout_s=timeout,
            num_processes=client_processes,
            metrics=percentile_metrics,
            percentiles=metric_percentiles,
            goodput=tuple(goodput or ()),
            saves=save_result or save_detailed or report,
            detailed=save_detailed,
            reports=report,
            result_dir=result_dir,
            result_filename=result_filename,
            label=label,
        )
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

    from crosspool.bench.compare import differences
    from crosspool.bench.saved import read_result
    from crosspool.bench.table import show_differences

    try:
        found = differences(read_result(first), read_result(second))
    except ValueError as error:
        raise CrossPoolError(str(error)) from None
    if as_json:
        print(json.dumps([{**asdict(item), "ratio": item.ratio} for item in found], indent=1))
    else:
        show_differences(found, Console())
