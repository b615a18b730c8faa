"""The command line: quick help, one-line errors, flags that reach the deployment."""

from __future__ import annotations

import inspect
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from crosspool import __version__, cli
from crosspool.commands.help import GROUPS
from crosspool.commands.serve import deployment, model_entries
from crosspool.errors import CrossPoolError
from crosspool.settings import Settings


def crosspool(*arguments: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "crosspool", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; sys.argv = ['crosspool', '--help']\n"
        "try:\n    from crosspool.cli import main; main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'numpy', 'tokenizers', 'pydantic'}\n"
        "print('heavy:', sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert "heavy: []" in found.stderr
    assert "serve" in found.stdout


def test_help_takes_less_than_half_a_second() -> None:
    """Of a core's time, which other work on the machine does not lengthen."""
    durations = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert crosspool("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        durations.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(durations) < 0.5


def test_characters_that_a_terminal_lacks_end_no_command() -> None:
    program = "from crosspool import cli; cli.app = lambda: print('\\u2581 caf\\u00e9'); cli.main()"
    variables = {**os.environ, "PYTHONIOENCODING": "ascii"}
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False, env=variables
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "? caf?\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is not here")
def test_a_full_disk_is_a_one_line_error() -> None:
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "crosspool", "serve", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
            check=False,
        )
    assert found.returncode == 1
    assert found.stderr == "error: cannot write any more: no space is left on the device\n"


@pytest.mark.parametrize("width", ["80", "60"])
@pytest.mark.parametrize("command", ["serve", "bench", "simulate", "limits"])
def test_help_shows_every_option_whole(command: str, width: str) -> None:
    shown = CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": width, "TERMINAL_WIDTH": width}).stdout
    found = typer.main.get_command(cli.app).commands[command]  # type: ignore[attr-defined]
    options = [name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)]
    assert len(options) > 5
    assert [name for name in options if name.startswith("--") and not re.search(rf"{name}[\s,]", shown)] == []


def test_help_shows_every_summary_whole() -> None:
    shown = " ".join(CliRunner().invoke(cli.app, ["--help"]).stdout.split())
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    assert {"serve", "chat", "plan", "bench", "load"} <= set(commands)
    for name, command in commands.items():
        summary = " ".join((command.help or "").split()).split(". ")[0]
        assert f"{name} {summary}" in shown


def test_help_of_serve_has_every_option_once_and_its_default() -> None:
    shown = CliRunner().invoke(cli.app, ["serve", "--help"]).stdout
    names = [line.split()[0] for line in shown.splitlines() if line.startswith("  --")]
    assert len(names) == len(set(names)) == len(inspect.signature(cli.serve).parameters) - 1  # models are no option
    assert "[inline]" in " ".join(shown.split())
    assert {name for names in GROUPS.values() for name in names.split()} <= set(inspect.signature(cli.serve).parameters)


@pytest.mark.parametrize("asked", ["version", "--version"])
def test_version(asked: str) -> None:
    assert CliRunner().invoke(cli.app, [asked]).stdout.strip() == __version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "/no/such/model", "--port", "0"), "no such directory"),
        (("serve", "no-such-name", "--port", "0"), "not a Hugging Face id"),
        (("serve", "--config", "/no/such.yaml"), "cannot read /no/such.yaml"),
        (("serve", ".", "--port", "99999"), "port is 99999"),
        (("serve", ".", "--kv-pool-bytes", "lots"), "lots"),
        (("serve", ".", "--layout", "cloud"), "layout"),
        (("serve", ".", "--port", "0"), "config.json"),
        (("serve", "a=.", "a=.."), "two models are called 'a'"),
        (("serve", "--served-model-name", "x"), "--served-model-name needs a model"),
        (("ps", "--base-url", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9"),
        (("generate", ".", "--prompts", "/no/such.txt"), "cannot read the prompts"),
    ],
)
def test_errors_are_one_line(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["crosspool", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr().err
    assert ended.value.code == 1
    assert message in told
    assert told.startswith("error: ")
    assert len(told.strip().splitlines()) == 1


def test_an_unknown_family_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    monkeypatch.setattr(sys, "argv", ["crosspool", "serve", f"mine={tmp_path}", "--port", "0"])
    with pytest.raises(SystemExit):
        cli.main()
    told = capsys.readouterr().err
    assert told.startswith("error: model mine: ")
    assert "nonesuch" in told
    assert len(told.strip().splitlines()) == 1


def test_an_unknown_hub_id_offline_is_one_line() -> None:
    """In a process of its own: the library reads HF_HUB_OFFLINE when it is imported."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "crosspool", "serve", "someone/some-model", "--port", "0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert found.returncode == 1
    assert "cannot fetch someone/some-model from Hugging Face" in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


def test_every_serve_option_is_a_setting_and_every_setting_an_option() -> None:
    options = set(inspect.signature(cli.serve).parameters) - set(cli.SERVE_ARGUMENTS[1:])
    without_a_flag = {"max_body_bytes", "max_header_bytes", "decode_lanes", "prefill_lanes"}
    assert options == set(Settings.model_fields) - without_a_flag


def test_flags_reach_the_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple] = []
    monkeypatch.setattr("crosspool.commands.serve.run", lambda *arguments, only_check: seen.append(arguments))
    arguments = ["serve", "m1", "--api-key", "a", "--api-key", "b", "--max-num-seqs", "3", "--shutdown-timeout", "0"]
    assert CliRunner().invoke(cli.app, [*arguments, "--served-model-name", "x"]).exit_code == 0
    config = deployment(*seen[0])
    assert config.server.api_keys == ("a", "b")
    assert (config.scheduling.max_num_seqs, config.server.shutdown_timeout_s) == (3, 0.0)
    assert config.models[0].served_name == "x"


def test_names_of_models_on_the_command_line(tmp_path: Path) -> None:
    assert model_entries(["q=/a", "/b"], []) == [{"path": "/a", "name": "q"}, {"path": "/b"}]
    assert model_entries(["/a"], ["x", "y", "z"]) == [{"path": "/a", "name": "x", "aliases": ["y", "z"]}]
    assert [entry["name"] for entry in model_entries(["/a", "/b"], ["x", "y"])] == ["x", "y"]
    with pytest.raises(CrossPoolError, match="2 models and 1 served names"):
        model_entries(["/a", "/b"], ["x"])
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert model_entries([str(odd)], []) == [{"path": str(odd)}]
