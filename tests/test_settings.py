"""Where settings come from: flags > environment > YAML > defaults; and the published schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crosspool.config import DeploymentConfig, ModelConfig
from crosspool.deployment.load import load_deployment
from crosspool.settings import Settings, deployment_schema
from crosspool.units import MiB

SCHEMA = Path(__file__).parent.parent / "docs" / "deployment.schema.json"
YAML = """
# comment
host: 0.0.0.0
port: 9000
max-num-seqs: 5
kv_pool_bytes: 64MiB
api_key: [from-yaml]
models:
  - path: /models/a
    aliases: [first]
    max_model_len: 100
  - /models/b
"""


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    path = tmp_path / "deployment.yaml"
    path.write_text(YAML)
    return path


def test_defaults() -> None:
    models = (ModelConfig(source="demo"),)
    assert load_deployment({}, default_models=models) == DeploymentConfig(models=models)


def test_flags_win_over_environment_over_yaml(yaml_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSPOOL_PORT", "9001")
    monkeypatch.setenv("CROSSPOOL_MAX_NUM_SEQS", "6")
    monkeypatch.setenv("CROSSPOOL_API_KEY", "one, two")
    monkeypatch.setenv("CROSSPOOL_SEED", "4")
    config = load_deployment({"port": 9002}, config_file=yaml_file)
    assert (config.server.port, config.server.host) == (9002, "0.0.0.0")  # flag, YAML
    assert (config.scheduling.max_num_seqs, config.scheduling.seed) == (6, 4)  # environment
    assert config.server.api_keys == ("one", "two")
    assert config.pools.kv_pool_bytes == 64 * MiB
    assert config.pools.frame_bytes == 2 * MiB  # default


def test_models_of_the_yaml_file(yaml_file: Path) -> None:
    config = load_deployment({"max_model_len": 50}, config_file=yaml_file)
    assert [model.served_name for model in config.models] == ["a", "b"]
    assert config.models[0].aliases == ("first",)
    assert [model.max_model_len for model in config.models] == [100, 50]
    assert [model.source for model in load_deployment({"models": ["/c"]}, config_file=yaml_file).models] == ["/c"]


def test_settings_of_all_models_hold_for_the_default_models_too() -> None:
    models = load_deployment(
        {"max_model_len": 50, "chat_template": "t.jinja"}, default_models=(ModelConfig(source="demo"),)
    ).models
    assert [(model.max_model_len, model.chat_template) for model in models] == [(50, "t.jinja")]


def test_shares_are_numbers_between_commas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert load_deployment({"weights_ranks": 2, "weights_shares": "3, 1"}).pools.weights_shares == (3.0, 1.0)
    file = tmp_path / "d.yaml"
    file.write_text("weights_ranks: 2\nweights_shares: [0.75, 0.25]\n")
    assert load_deployment({}, config_file=file).pools.weights_shares == (0.75, 0.25)
    monkeypatch.setenv("CROSSPOOL_WEIGHTS_SHARES", "2,1")
    assert load_deployment({}, config_file=file).pools.weights_shares == (2.0, 1.0)
    with pytest.raises(ValueError, match=r"weights_shares\.0 is 'most'"):
        load_deployment({"weights_shares": "most"})


def test_a_file_may_name_one_gpu_without_a_list(tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text("backend: cuda\nprefill: dedicated\nprefill_gpus: 1\n")
    assert load_deployment({}, config_file=path).pools.prefill_gpus == (1,)


@pytest.mark.parametrize("name", [name for name in Settings.model_fields if name.endswith("_bytes")])
def test_what_is_no_size_is_told_with_its_setting(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 'lots': 'lots' is not a size; write bytes"):
        load_deployment({name: "lots"})


def test_an_empty_variable_does_not_take_the_key_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSPOOL_API_KEY", "")
    with pytest.raises(ValueError, match="an api_key is empty"):
        load_deployment({})


def test_a_hub_id_keeps_its_whole_name() -> None:
    assert load_deployment({"models": ["Qwen/Qwen3-30B-A3B"]}).models[0].served_name == "Qwen/Qwen3-30B-A3B"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 8000", "prot is not a setting"),
        ("port: many", "port is 'many'"),
        ("port: 99999", "port is 99999"),
        ("kv_pool_bytes: 5 apples", "5 apples"),
        ("models: [{path: /a, nam: x}]", "models.0.nam is not a setting"),
        ("models: [{name: x}]", "models.0.path is missing"),
        ("api_key: ''", "an api_key is empty"),
        ("allowed_origins: page.example", "allowed_origins has 'page.example'; an origin is scheme"),
        ("allowed_origins: ['*', 'https://page.example/']", "allowed_origins has 'https://page.example/'"),
        ("max_num_batched_tokens: 0", "max_num_batched_tokens is 0; it must be at least 1"),
        ("seed: -4", "seed is -4"),
        ("seed: 99999999999999999999", "seed is 99999999999999999999"),
        ("recovery_timeout: .nan", "recovery_timeout is nan"),
        ("queue_timeout: .nan", "queue_timeout is nan"),
        ("shutdown_timeout: .nan", "shutdown_timeout is nan"),
        ("layout: cluster", "layout is 'cluster'"),
        ("- a", "must be a mapping"),
        ("a: [", "not valid YAML"),
        ("models: []", "models is empty"),
        ("port: 1\nport: 2", "line 2, column 1: 'port' stands there a second time"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "max_num_seqs twice"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "d.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message.replace("[", r"\[")) as error:
        load_deployment({}, config_file=path)
    assert "\n" not in str(error.value)


def test_a_wrong_value_is_told_behind_the_file_it_is_from_and_no_other(
    yaml_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"^port is 'many'"):
        load_deployment({"port": "many"}, config_file=yaml_file)
    monkeypatch.setenv("CROSSPOOL_HOST", "0.0.0.0")
    monkeypatch.setenv("CROSSPOOL_MAX_NUM_SEQS", "few")
    with pytest.raises(ValueError, match=r"^max_num_seqs is 'few'"):
        load_deployment({}, config_file=yaml_file)
    yaml_file.write_text("models: [{path: /a, nam: x}]\nport: many\n")
    with pytest.raises(ValueError, match=rf"^{yaml_file}: port is 'many'"):
        load_deployment({"models": ["/b"], "max_num_seqs": 1}, config_file=yaml_file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*nope\.yaml"):
        load_deployment({}, config_file=tmp_path / "nope.yaml")


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    assert load_deployment({}, config_file=path) == DeploymentConfig(models=())


def test_the_published_schema_is_the_settings() -> None:
    """After a change: python -m crosspool.settings > docs/deployment.schema.json."""
    assert json.loads(SCHEMA.read_text()) == deployment_schema()


def test_every_setting_is_described() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


def test_decode_lanes_follow_from_the_pipeline_and_the_weights_pool() -> None:
    models = (ModelConfig(source="demo"),)
    lanes = {
        str(flags): load_deployment(flags, default_models=models).scheduling.num_decode_lanes
        for flags in ({}, {"pipeline": "off"}, {"decode_lanes": 3}, {"pipeline": "off", "decode_lanes": 1})
    }
    assert list(lanes.values()) == [2, 1, 3, 1]
    wide: dict[str, object] = {"backend": "cuda", "weights_ranks": 3}
    changes: list[dict[str, object]] = [
        {},
        {"weights_ranks": 2},
        {"backend": "numpy"},
        {"baseline": "static"},
        {"weights_shares": "2,2,1"},
        {"gpus": 1},
        {"gpus": 4},
        {"gpus": 4, "prefill": "dedicated"},  # the pools share three of them
        {"gpus": 5, "prefill": "dedicated"},
        {"decode_lanes": 2},
        {"pipeline": "off"},
    ]
    found = [load_deployment(wide | change, default_models=models).scheduling.num_decode_lanes for change in changes]
    assert found == [3, 2, 2, 2, 2, 2, 3, 2, 3, 2, 1]
    with pytest.raises(ValueError, match="decode_lanes is 3 with pipeline off, which has one"):
        load_deployment({"pipeline": "off", "decode_lanes": 3}, default_models=models)


def test_a_pipeline_that_is_off_wins_over_the_lanes_of_a_plan() -> None:
    models, planned = (ModelConfig(source="demo"),), {"decode_lanes": 3}
    assert load_deployment({}, planned=planned, default_models=models).scheduling.num_decode_lanes == 3
    off = load_deployment({"pipeline": "off"}, planned=planned, default_models=models)
    assert off.scheduling.num_decode_lanes == 1


@pytest.mark.parametrize("control", ["graphs", "resident"])
def test_on_cpus_the_host_drives_and_nothing_else_is_taken(control: str) -> None:
    models = (ModelConfig(source="demo"),)
    assert load_deployment({}, default_models=models).pools.driven_by == "host"
    assert load_deployment({"control": "host"}, default_models=models).pools.driven_by == "host"
    with pytest.raises(ValueError, match=f"control is {control} with backend numpy, where it means nothing"):
        load_deployment({"control": control}, default_models=models)
    cuda = {"backend": "cuda"}
    assert load_deployment(cuda, default_models=models).pools.driven_by == "graphs"
    assert load_deployment({**cuda, "control": control}, default_models=models).pools.driven_by == control


@pytest.mark.parametrize("name", ["static", "elastic"])
def test_a_layout_may_name_a_baseline(name: str, tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(f"layout: {name}\n")
    flags = {"kv_ranks": 1, "weights_ranks": 1}
    by_flag = load_deployment({**flags, "baseline": name})
    assert by_flag.pools.baseline == name
    assert by_flag == load_deployment({**flags, "layout": name}) == load_deployment(flags, config_file=path)
    assert load_deployment({**flags, "layout": "crosspool"}) == load_deployment(flags)
    other = "elastic" if name == "static" else "static"
    with pytest.raises(ValueError, match=f"^layout is '{name}' and baseline '{other}'; give one of them$"):
        load_deployment({"api_key": ["not to be told"], **flags, "layout": name, "baseline": other})
