"""A model directory read as data: end tokens of three sources, names, defaults, and what is wrong said in one line."""

from __future__ import annotations

import json
import logging

import pytest

from crosspool.errors import CheckpointError, UnsupportedModelError
from crosspool.models.directory import GenerationDefaults, read_model_dir
from tests.support.tiny_models import write_tiny_model
from tests.support.tiny_tokenizer import END_OF_TURN, write_tiny_tokenizer


def write_json(path, **values):
    path.write_text(json.dumps(values))


@pytest.fixture
def model(tmp_path):
    return write_tiny_model(tmp_path / "tiny-qwen", "qwen3_moe", eos_token_id=7)


def test_a11_end_tokens_are_the_union_of_all_three_sources(model):
    write_json(model / "generation_config.json", eos_token_id=[7, 9])
    write_tiny_tokenizer(model, eos_token=END_OF_TURN)  # id 1
    assert read_model_dir(model).spec.eos_token_ids == (7, 9, 1)


def test_a11_another_generation_setting_keeps_the_list(model):
    write_json(model / "generation_config.json", eos_token_id=[7, 9], temperature=0.6, top_k=20)
    directory = read_model_dir(model)
    assert directory.spec.eos_token_ids == (7, 9, 0)
    assert directory.generation == GenerationDefaults(temperature=0.6, top_k=20)


@pytest.mark.parametrize(("content", "expected"), [(None, (7, 0)), ({"eos_token_id": 9}, (7, 9, 0)), ({}, (7, 0))])
def test_generation_config_may_be_absent_or_scalar(model, content, expected):
    (model / "generation_config.json").unlink()
    if content is not None:
        write_json(model / "generation_config.json", **content)
    assert read_model_dir(model).spec.eos_token_ids == expected


def test_an_end_token_as_an_object_in_either_tokenizer_file(model):
    write_json(model / "tokenizer_config.json", tokenizer_class="X")
    write_json(model / "special_tokens_map.json", eos_token={"content": END_OF_TURN, "lstrip": False})
    assert read_model_dir(model).spec.eos_token_ids == (7, 1)


def test_an_end_token_without_tokenizer_json_comes_from_its_decoder(model):
    (model / "tokenizer.json").unlink()
    decoder = {"301": {"content": "<eos>"}}
    write_json(model / "tokenizer_config.json", eos_token="<eos>", added_tokens_decoder=decoder)
    assert read_model_dir(model).spec.eos_token_ids[-1] == 301


def test_an_end_token_outside_the_vocabulary_is_reported(model, caplog):
    write_json(model / "tokenizer_config.json", eos_token="<nowhere>")
    with caplog.at_level(logging.WARNING, logger="crosspool"):
        assert 7 in read_model_dir(model).spec.eos_token_ids
    assert "<nowhere>" in caplog.text


def test_end_tokens_beyond_the_vocabulary_are_left_out_and_told(model, caplog):
    write_json(model / "generation_config.json", eos_token_id=[7, 512, -1])
    with caplog.at_level(logging.WARNING, logger="crosspool"):
        assert read_model_dir(model).spec.eos_token_ids == (7, 0)
    assert "[512, -1]" in caplog.text


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("temperature", -1, "at least 0"),
        ("temperature", 2.5, "at most 2"),
        ("top_p", 0, "above 0"),
        ("top_p", 1.5, "at most 1"),
        ("min_p", -0.1, "at least 0"),
        ("repetition_penalty", 0, "above 0"),
        ("top_k", -2, "at least -1"),
    ],
)
def test_recommended_sampling_that_no_request_may_ask_for_is_refused(model, name, value, bound):
    write_json(model / "generation_config.json", **{name: value})
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {name} is {value}; .*{bound}"):
        read_model_dir(model)


def test_the_ends_of_what_may_be_recommended(model):
    write_json(model / "generation_config.json", temperature=0, top_p=1, top_k=-1, min_p=0, repetition_penalty=10)
    expected = GenerationDefaults(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=10.0)
    assert read_model_dir(model).generation == expected


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", {"added_tokens": [{"content": "<eos>"}]}),
        ("tokenizer.json", {"model": [1]}),
        ("tokenizer_config.json", {"eos_token": "<eos>", "added_tokens_decoder": [1]}),
        ("tokenizer_config.json", {"eos_token": "<eos>", "added_tokens_decoder": {"x": {"content": "<eos>"}}}),
    ],
)
def test_tokens_that_are_no_list_are_told_in_one_line(model, file, content):
    write_json(model / "tokenizer_config.json", eos_token="<eos>")
    write_json(model / file, **content)
    with pytest.raises(CheckpointError, match=r"^[^\n]*tokenizer's files[^\n]*$"):
        read_model_dir(model)


def test_no_end_token_at_all_is_allowed(tmp_path):
    path = write_tiny_model(tmp_path, "llama", eos_token_id=None, tokenizer=False)
    assert read_model_dir(path).spec.eos_token_ids == ()


def test_names_and_files(model, tmp_path):
    directory = read_model_dir(model)
    assert directory.served_name == "tiny-qwen"
    assert directory.tokenizer_files == ("tokenizer.json", "tokenizer_config.json")
    snapshot = tmp_path / "models--acme--Tiny-1B" / "snapshots" / "0123abcd"
    write_tiny_model(snapshot, "llama", tokenizer=False)
    assert read_model_dir(snapshot).served_name == "acme/Tiny-1B"
    assert read_model_dir(snapshot).tokenizer_files == ()


def test_remote_code_is_ignored(model, caplog):
    config = json.loads((model / "config.json").read_text())
    write_json(model / "config.json", **config, auto_map={"AutoModelForCausalLM": "evil.Model"}, trust_remote_code=True)
    (model / "evil.py").write_text("raise SystemExit('remote code ran')")
    with caplog.at_level(logging.INFO, logger="crosspool"):
        assert read_model_dir(model).spec.family == "qwen3_moe"
    assert "no remote code" in caplog.text


def test_a_multimodal_wrapper_is_refused_in_one_line(model):
    config = json.loads((model / "config.json").read_text())
    write_json(model / "config.json", model_type="some_vision_wrapper", text_config=config, vision_config={"depth": 3})
    with pytest.raises(UnsupportedModelError, match=r"'some_vision_wrapper'.*text_config.*language model alone"):
        read_model_dir(model)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_type": "llama", ', "not valid JSON"),
        ("[1, 2]", "JSON list"),
        ("{}", "model_type is missing"),
        ('{"model_type": "llama", "hidden_size": "64"}', "hidden_size is '64'"),
        ('{"model_type": "llama", "num_hidden_layers": 0}', "num_hidden_layers is 0"),
        ('{"model_type": "llama", "eos_token_id": "</s>"}', "eos_token_id is '</s>'"),
        ('{"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 4}', "6 is not a multiple"),
        ('{"model_type": "llama", "tie_word_embeddings": 1}', "tie_word_embeddings is 1"),
        ('{"model_type": "llama", "rope_scaling": "yarn"}', "rope_parameters is 'yarn'"),
        ('{"model_type": "llama", "rope_scaling": {"type": "linear"}}', "factor is missing"),
    ],
)
def test_broken_configs_say_what_is_wrong(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError) as caught:
        read_model_dir(tmp_path)
    assert message in str(caught.value)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_absent_directory_or_config_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        read_model_dir(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        read_model_dir(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read \(Is a directory\)"):
        read_model_dir(tmp_path)


def test_an_end_token_that_was_added_is_found_without_the_vocabulary(model):
    """Which takes long to read, and is read in every process of a rank."""
    write_tiny_tokenizer(model, eos_token=END_OF_TURN)
    before = read_model_dir(model).spec.eos_token_ids
    text = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(text[: text.index('"vocab"')])
    assert read_model_dir(model).spec.eos_token_ids == before == (7, 1)
