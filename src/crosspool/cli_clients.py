"""Commands that talk to a running server. Each imports what it needs when it is called."""

from typing import Annotated

import typer

app = typer.Typer()

BaseUrl = Annotated[str, typer.Option(help="where the server is", envvar="CROSSPOOL_BASE_URL")]
ClientKey = Annotated[str | None, typer.Option("--api-key", help="the server's key", envvar="CROSSPOOL_API_KEY")]
AdminKey = Annotated[
    str | None,
    typer.Option("--admin-api-key", "--api-key", help="the server's admin key", envvar="CROSSPOOL_ADMIN_API_KEY"),
]
Words = list[str] | None
LOCAL = "http://localhost:8000"


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
    from crosspool.server_client import ServerClient

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

    from crosspool.commands.ps import run
    from crosspool.server_client import ServerClient

    run(ServerClient(base_url, api_key), as_json=as_json, console=Console())


@app.command()
def top(
    base_url: BaseUrl = LOCAL,
    api_key: ClientKey = None,
    interval: Annotated[float, typer.Option(min=0.1, help="seconds between two looks")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="show this moment and leave, as off a terminal")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the present moment as JSON")] = False,
) -> None:
    """Watch both pools, the lanes and the queues of a running server."""
    from rich.console import Console

    from crosspool.commands.top import run
    from crosspool.server_client import ServerClient

    client = ServerClient(base_url, api_key)
    run(client, interval_s=interval, once=once, as_json=as_json, console=Console())


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

    from crosspool.commands.limits import run
    from crosspool.server_client import ServerClient

    client = ServerClient(base_url, api_key)
    run(client, model, floor=floor, ceiling=ceiling, budget=budget, as_json=as_json, console=Console())


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
    from crosspool.server_client import ServerClient

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
    from crosspool.server_client import ServerClient

    models.unload(ServerClient(base_url, api_key), model, drains=drain, waits=wait, console=Console())
