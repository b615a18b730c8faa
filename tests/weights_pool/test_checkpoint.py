"""Damaged, incomplete and foreign checkpoints: one error that names file, tensor and sizes, before anything is read."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from crosspool.errors import CheckpointError, UnsupportedModelError
from crosspool.models.directory import read_model_dir
from crosspool.weights_pool.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint
from crosspool.weights_pool.loader import load_attention_weights, load_ffn_weights
from tests.support.tiny_models import write_tiny_model

ROUTER = "model.layers.1.mlp.gate.weight"


@pytest.fixture
def sharded(tmp_path):
    return write_tiny_model(tmp_path / "model", "qwen3_moe", num_shards=4, tokenizer=False)


@pytest.fixture
def single(tmp_path):
    return write_tiny_model(tmp_path / "model", "qwen3_moe", tokenizer=False)


def refuse(path, *words):
    """Both halves refuse it, whichever half of the weights is damaged, in one line with all of `words`."""
    directory = read_model_dir(path)
    for load in (lambda: load_attention_weights(directory), lambda: load_ffn_weights(directory, 0, 1)):
        with pytest.raises(CheckpointError) as caught:
            load()
        message = str(caught.value)
        assert "\n" not in message
        for word in words:
            assert word in message, message


def rewrite(path, change):
    tensors = load_file(path / SINGLE_NAME)
    change(tensors)
    save_file(tensors, path / SINGLE_NAME)


def shard(path, number):
    return path / f"model-{number:05}-of-00004.safetensors"


def test_a41_a_missing_shard_is_named_with_its_tensors(sharded):
    shard(sharded, 2).unlink()
    lost = [t for t, f in json.loads((sharded / INDEX_NAME).read_text())["weight_map"].items() if "00002-of" in f]
    refuse(sharded, "model-00002-of-00004.safetensors", f"{len(lost)} tensors", lost[0], "incomplete download?")


def test_a41_a_renamed_shard_is_a_missing_one(sharded):
    shard(sharded, 3).rename(sharded / "model-00003.safetensors")
    refuse(sharded, "model-00003-of-00004.safetensors", "incomplete download?")


def test_a41_an_index_that_names_what_its_shard_lacks(sharded):
    tensors = load_file(shard(sharded, 1))
    name = next(iter(tensors))
    del tensors[name]
    save_file(tensors, shard(sharded, 1))
    refuse(sharded, name, "model-00001-of-00004.safetensors")


def test_a41_a_leftover_shard_is_ignored_with_one_line(sharded, caplog):
    save_file({"model.layers.0.mystery": np.zeros(3, np.float32)}, sharded / "model-00009-of-00009.safetensors")
    with caplog.at_level(logging.INFO, logger="crosspool"):
        load_ffn_weights(read_model_dir(sharded), 0, 1)
    lines = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert len(lines) == 1
    assert "model-00009-of-00009.safetensors" in lines[0]


@pytest.mark.parametrize("keep", [0, 5, 300, -4])
def test_a_cut_short_file_is_told_with_its_sizes(single, keep):
    file = single / SINGLE_NAME
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    words = [SINGLE_NAME, "incomplete download"]
    refuse(single, *words, *([f"promises {len(content)} bytes", str(len(content) - 4)] if keep == -4 else []))


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_told_without_waiting_for_it(single, make):
    (single / SINGLE_NAME).unlink()
    make(single / SINGLE_NAME)
    refuse(single, f"{SINGLE_NAME}: not a regular file")


def test_bytes_beyond_the_header_are_told(single):
    file = single / SINGLE_NAME
    file.write_bytes(file.read_bytes() + b"xyz")
    refuse(single, "3 B too many")


def test_a_damaged_header_is_told(single):
    file = single / SINGLE_NAME
    content = bytearray(file.read_bytes())
    content[8:12] = b"\xff\xff\xff\xff"
    file.write_bytes(content)
    refuse(single, "header is damaged")


def test_a_missing_tensor_is_named(single):
    rewrite(single, lambda tensors: tensors.pop(ROUTER))
    refuse(single, ROUTER, "1 of")


def test_one_missing_expert_matrix_is_named(single):
    name = "model.layers.2.mlp.experts.7.up_proj.weight"
    rewrite(single, lambda tensors: tensors.pop(name))
    refuse(single, name)


def test_a_wrong_shape_is_told_with_both_shapes(single):
    rewrite(single, lambda tensors: tensors.__setitem__(ROUTER, np.zeros((8, 63), np.float32)))
    refuse(single, ROUTER, "[8, 63]", "[8, 64]", SINGLE_NAME)


def test_a_wrong_dtype_is_told(single):
    rewrite(single, lambda tensors: tensors.__setitem__(ROUTER, np.zeros((8, 64), np.int8)))
    refuse(single, ROUTER, "I8", "BF16")


def test_an_unknown_tensor_is_an_error(single):
    name = "model.layers.2.mlp.mystery.weight"
    rewrite(single, lambda tensors: tensors.__setitem__(name, np.zeros(3, np.float32)))
    refuse(single, name)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.rotary_emb.inv_freq", "xmodel.rotary_emb.inv_freq"])
def test_buffers_are_ignored_by_exact_name_only(single, name):
    rewrite(single, lambda tensors: tensors.__setitem__(name, np.zeros(3, np.float32)))
    refuse(single, name)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"])
def test_rotary_buffers_are_ignored(single, name):
    before = load_attention_weights(read_model_dir(single))
    rewrite(single, lambda tensors: tensors.__setitem__(name, np.zeros(3, np.float32)))
    after = load_attention_weights(read_model_dir(single))
    assert before.layers[1].keys() == after.layers[1].keys()


@pytest.mark.parametrize("has_head", [False, True])
def test_a_tied_head_may_be_in_the_file_or_not(single, has_head):
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    if has_head:
        rewrite(single, lambda tensors: tensors.__setitem__("lm_head.weight", tensors["model.embed_tokens.weight"]))
    else:
        rewrite(single, lambda tensors: tensors.pop("lm_head.weight"))
    assert set(load_attention_weights(read_model_dir(single)).model) == {"embed", "final_norm"}


def test_a_head_of_its_own_is_not_dropped_for_a_config_that_ties_it(single):
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    refuse(single, "lm_head.weight", "another matrix than model.embed_tokens.weight", "tie_word_embeddings to false")
    rewrite(single, lambda tensors: tensors.__setitem__("lm_head.weight", np.zeros(3, np.float32)))
    refuse(single, "lm_head.weight", "another matrix")


@pytest.mark.parametrize("prefix", ["language_model.model.", ""])
def test_names_of_a_model_around_or_within_are_told(single, prefix):
    def rename(tensors):
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)

    rewrite(single, rename)
    refuse(single, f"there is {prefix}embed_tokens.weight", "a larger model around this one")


def test_an_untied_head_must_be_there(single):
    rewrite(single, lambda tensors: tensors.pop("lm_head.weight"))
    refuse(single, "lm_head.weight")


def test_a45_a_config_that_builds_moe_layers_dense_does_not_load(single):
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps({**config, "num_experts": 0}))
    refuse(single, "model.layers.0.mlp.down_proj.weight", "9 of 36")


@pytest.mark.parametrize("field", [1, 0, None])
def test_a27_prediction_layers_are_skipped_with_one_line(tmp_path, caplog, field):
    """Five layers in the files, four in the config: layer 4 is skipped whatever the field for it says."""
    overrides = {} if field is None else {"num_nextn_predict_layers": field}
    path = write_tiny_model(tmp_path, "glm4_moe_lite", num_layers=5, tokenizer=False)
    whole = load_ffn_weights(read_model_dir(path), 0, 1)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4, **overrides}))
    rewrite(path, lambda tensors: tensors.__setitem__("model.layers.4.eh_proj.weight", np.zeros((4, 8), np.float32)))
    directory = read_model_dir(path)
    with caplog.at_level(logging.INFO, logger="crosspool"):
        weights = load_ffn_weights(directory, 0, 1)
    lines = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert len(lines) == 1
    assert "layers 4 skipped" in lines[0]
    assert directory.spec.num_layers == len(weights.layers) == 4
    for first, second in zip(whole.layers, weights.layers, strict=False):
        np.testing.assert_array_equal(
            first["shared_gate" if "shared_gate" in first else "gate"],
            second["shared_gate" if "shared_gate" in second else "gate"],
        )


def test_a27_a_mystery_tensor_is_an_error_beside_prediction_layers(tmp_path):
    path = write_tiny_model(tmp_path, "glm4_moe_lite", num_layers=4, tokenizer=False)
    name = "model.layers.2.mlp.mystery.weight"

    def change(tensors):
        tensors["model.layers.4.eh_proj.weight"] = np.zeros((4, 8), np.float32)
        tensors[name] = np.zeros((4, 8), np.float32)

    rewrite(path, change)
    refuse(path, name)


def test_a_directory_without_safetensors_says_what_it_needs(single):
    (single / SINGLE_NAME).unlink()
    (single / "pytorch_model.bin").write_bytes(b"x")
    refuse(single, SINGLE_NAME, INDEX_NAME, ".bin")


def test_shards_without_their_index_are_named(sharded):
    (sharded / INDEX_NAME).unlink()
    refuse(sharded, "model-00001-of-00004.safetensors", "no index")


def test_an_index_cannot_lead_out_of_its_directory(sharded):
    index = json.loads((sharded / INDEX_NAME).read_text())
    index["weight_map"]["lm_head.weight"] = "../secret.safetensors"
    (sharded / INDEX_NAME).write_text(json.dumps(index))
    refuse(sharded, "../secret.safetensors")


def test_quantised_checkpoints_are_refused_by_name(single):
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UnsupportedModelError, match=r"'fp8'.*bfloat16"):
        read_model_dir(single)


def test_files_are_closed_at_the_end(single):
    checkpoint = Checkpoint(single)
    with checkpoint:
        checkpoint.read("model.norm.weight", (slice(None),))
        assert list(checkpoint._open) == [single / SINGLE_NAME]
    assert checkpoint._open == {}
