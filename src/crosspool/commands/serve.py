"""`crosspool serve`: settings to a running server."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from crosspool.cluster.rank_log import RankLog
from crosspool.commands import check
from crosspool.commands.loading import Notices, above_bars, shown_while_loading, teller
from crosspool.config import DeploymentConfig, LogFormat
from crosspool.deployment.launch import load_models, start_engine
from crosspool.deployment.load import load_deployment
from crosspool.deployment.model_source import named_source
from crosspool.deployment.prefill_room import prefill_summary, with_prefill_room
from crosspool.deployment.prepared_model import catalogue, demo_models, prepare_model, prepare_models, whole_models
from crosspool.errors import CrossPoolError
from crosspool.log_lines import text_formatter
from crosspool.server.app import create_app
from crosspool.server.context import json_formatter
from crosspool.server.open_files import raise_limit
from crosspool.server.run import check_tls, listen, run_loop, serve


def run(
    sources: Sequence[str],
    served_names: Sequence[str],
    config_file: Path | None,
    flags: Mapping[str, Any],
    plan_file: Path | None = None,
    plan_group: str | None = None,
    *,
    only_check: bool = False,
) -> None:
    """Serve until a signal, or only look at what would be served.

    Raises CrossPoolError, in one line, for whatever keeps the server from starting.
    """
    config = deployment(sources, served_names, config_file, flags, plan_file, plan_group)
    console = Notices()
    set_up_logging(config.server.log_level, console, config.server.log_format)
    if only_check:
        check.run(config, console)
    else:
        run_loop(_serve(config, console))


def deployment(
    sources: Sequence[str],
    served_names: Sequence[str],
    config_file: Path | None,
    flags: Mapping[str, Any],
    plan_file: Path | None = None,
    plan_group: str | None = None,
) -> DeploymentConfig:
    """The deployment that the command line and what lies below it describe. Raises CrossPoolError for a wrong value."""
    if plan_group is not None and plan_file is None:
        raise CrossPoolError("--plan-group names a group of a plan; give --plan FILE too")
    given = dict(flags)
    if sources:
        given["models"] = model_entries(sources, served_names)
    elif served_names:
        raise CrossPoolError("--served-model-name needs a model on the command line; name it or use `name:` in YAML")
    try:
        planned = _planned(plan_file, plan_group) if plan_file is not None else None
        config = load_deployment(given, config_file=config_file, planned=planned, default_models=demo_models())
        if planned is not None:
            _check_models(config, planned)
    except ValueError as error:
        raise CrossPoolError(str(error)) from None
    if not config.models:
        raise CrossPoolError("no model to serve; give a model directory, a Hugging Face id, or --config FILE")
    return config


def _planned(plan_file: Path, group: str | None) -> dict[str, Any]:
    from crosspool.planner.plan import read_plan
    from crosspool.planner.serve_config import serve_settings

    plan = read_plan(plan_file)
    return serve_settings(plan, plan.group_named(group))


def _check_models(config: DeploymentConfig, planned: Mapping[str, Any]) -> None:
    """A plan is for its models: others under its numbers would be neither planned nor told."""
    wanted = [(entry["path"], entry["name"]) for entry in planned["models"]]
    if [(model.source, model.name) for model in config.models] != wanted:
        names = ", ".join(name for _, name in wanted)
        raise ValueError(f"the plan says which models are served ({names}); name none beside --plan, or plan again")


def model_entries(sources: Sequence[str], served_names: Sequence[str]) -> list[dict[str, Any]]:
    """`models:` entries of the command line: DIR, ID or NAME=DIR.

    One model takes every served name, the first as its own and the rest as aliases; several take one each, in order.
    """
    entries: list[dict[str, Any]] = []
    for name, path in map(named_source, sources):
        entries.append({"path": path} if name is None else {"path": path, "name": name})
    if not served_names:
        return entries
    if len(entries) == 1:
        return [{**entries[0], "name": served_names[0], "aliases": list(served_names[1:])}]
    if len(served_names) != len(entries):
        raise CrossPoolError(
            f"{len(entries)} models and {len(served_names)} served names; give one --served-model-name for each model"
        )
    return [{**entry, "name": name} for entry, name in zip(entries, served_names, strict=True)]


async def _serve(config: DeploymentConfig, console: Console) -> None:
    check_tls(config.server)
    raise_limit()
    tell = teller(console, config.server.log_format)
    listener = listen(config.server)  # before anything is loaded: a taken port is told at once
    with listener, above_bars(console) as lines:
        models = prepare_models(config)
        specs = whole_models(models)
        config = with_prefill_room(config, specs)
        if (line := prefill_summary(config, specs)) is not None:
            tell(line)
        log = RankLog(config.server.log_level, config.server.log_format == "json", lines)
        engine = start_engine(config, models, log)
        host, port = listener.getsockname()[:2]
        scheme = "http" if config.server.ssl_certfile is None else "https"

        async def load() -> None:
            with shown_while_loading(engine, console, tell):
                await load_models(engine, models)
            names = ", ".join(model.served.name for model in models)
            tell(
                f"serving {names} on {scheme}://{_shown_host(host)}:{port}  (/ui to watch and ask, "
                "/docs for the routes, Ctrl-C ends it)"
            )

        app = create_app(engine, catalogue(models), config.server, lambda model: prepare_model(model, config))
        await serve(app, engine, load, listener, config.server)


def _shown_host(host: str) -> str:
    if host in ("127.0.0.1", "0.0.0.0", "::", "::1"):
        return "localhost"
    return f"[{host}]" if ":" in host else host


def set_up_logging(level: str, console: Console, log_format: LogFormat = "auto") -> None:
    """Log lines on standard error: JSON if asked for, else coloured on a terminal (above the progress bars there)."""
    handler: logging.Handler
    if log_format == "json":
        handler = logging.StreamHandler()
        handler.setFormatter(json_formatter())
    elif console.is_terminal and log_format == "auto":
        from rich.logging import RichHandler

        handler = RichHandler(console=console, show_path=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(text_formatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
