"""The catalogue: every entry against the published sizes, names that stand for others, kinds that are refused."""

from __future__ import annotations

import json

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from crosspool.errors import UnsupportedModelError
from crosspool.planner.catalogue import catalogue_facts, entries, facts_from_shape, lookup, model_facts
from tests.support.tiny_models import write_tiny_model

# all GB, FFN GB, non-FFN GB (bf16, 1e9 bytes), KV bytes per token
PUBLISHED = {
    "qwen3-30b-a3b": (61.1, 58.0, 3.06, 98304),
    "glm-4.7-flash": (59.9, 56.6, 3.31, 54144),
    "deepseek-v2-lite": (31.4, 29.8, 1.58, 31104),
    "mixtral-8x7b": (93.4, 90.2, 3.21, 131072),
    "olmoe-1b-7b": (13.8, 12.9, 0.95, 131072),
    "qwen3-next-80b-a3b": (159.3, 155.0, 4.33, 24576),
    "qwen3.5-35b-a3b": (69.3, 64.7, 4.60, 20480),
    "gpt-oss-20b": (41.8, 38.2, 3.59, 49152),
    "gpt-oss-120b": (233.6, 229.4, 4.23, 73728),
    "qwen3-235b-a22b": (470.2, 454.3, 15.89, 192512),
    "deepseek-v3": (1342.0, 1315.5, 26.53, 70272),
    "kimi-k2": (2053.0, 2035.8, 17.03, 70272),
    "glm-4.5-air": (213.7, 201.2, 12.52, 188416),
    "minimax-m2": (457.4, 449.5, 7.92, 253952),
    "llama-4-scout": (215.5, 205.4, 10.18, 196608),
    "llama-4-maverick": (801.4, 791.2, 10.18, 196608),
    "granite-3.1-1b-a400m": (2.7, 2.4, 0.25, 49152),
    "ernie-4.5-21b-a3b": (43.7, 42.2, 1.41, 57344),
}
ROUNDING_GB = 0.06  # the table's last digit
ROUTER_FLOAT32 = 2e-3  # routers are kept in float32; the table counts two bytes


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_sizes_are_the_published_ones(name):
    total, ffn, rest, kv_bytes = PUBLISHED[name]
    facts = catalogue_facts(name)
    assert facts.kv_bytes_per_token == kv_bytes
    assert facts.weight_bytes / 1e9 == pytest.approx(total, rel=ROUTER_FLOAT32, abs=ROUNDING_GB)
    assert facts.ffn_bytes / 1e9 == pytest.approx(ffn, rel=ROUTER_FLOAT32, abs=ROUNDING_GB)
    assert facts.kv_pool_weight_bytes / 1e9 == pytest.approx(rest, rel=ROUTER_FLOAT32, abs=0.006)


def test_every_entry_has_pages_that_are_nearly_full():
    for name in entries():
        facts = catalogue_facts(name)
        assert facts.geometry(2 << 20).fill > 0.8, name


def test_names_of_the_hub_and_of_other_platforms_are_known():
    assert catalogue_facts("Qwen/Qwen3-30B-A3B").name == "qwen3-30b-a3b"
    assert catalogue_facts("qwen3-30B-A3B", "mine").name == "mine"
    exact, near = lookup("openai/gpt-oss-120b-TEE"), lookup("zai-org/GLM-5-TEE")
    assert exact is not None
    assert exact.is_exact
    assert near is not None
    assert not near.is_exact
    assert lookup("nobody/nothing") is None


def test_families_that_cannot_be_served_say_so():
    assert catalogue_facts("qwen3-30b-a3b").servable
    assert not catalogue_facts("minimax-m2").servable


def test_linear_attention_holds_a_fixed_state_and_no_kv_per_token():
    facts = catalogue_facts("qwen3-next-80b-a3b")
    assert facts.num_layers == 48
    assert facts.kv_bytes_per_token == 12 * 2 * 2 * 256 * 2
    assert facts.state_bytes == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)


def test_unknown_kinds_of_kv_are_an_error():
    shape = {"hidden_size": 8, "num_layers": 1, "vocab_size": 8, "max_positions": 8, "ffn": {}}
    with pytest.raises(UnsupportedModelError, match="new-model has attention of kind 'lightning'"):
        facts_from_shape({**shape, "attention": {"kind": "lightning"}}, "new-model")


CONFIG = {"model_type": "olmoe", "num_hidden_layers": 2, "torch_dtype": "bfloat16"}


def test_an_id_of_the_hub_needs_its_config_only(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    asked = []

    def download(repository, file):
        asked.append((repository, file))
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    facts = model_facts("owner/new-model")
    assert asked == [("owner/new-model", "config.json")]
    assert (facts.name, facts.num_layers) == ("owner/new-model", 2)


def test_an_id_that_cannot_be_fetched_is_one_line(monkeypatch):
    def download(repository, file):
        raise LocalEntryNotFoundError("no\nnetwork")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(
        ValueError, match=r"cannot get config\.json of owner/new-model: no network; give a model directory"
    ):
        model_facts("owner/new-model")


def test_a_directory_wins_and_an_unknown_name_lists_the_entries(tmp_path):
    directory = write_tiny_model(tmp_path / "tiny", "qwen3_moe")
    facts = model_facts(str(directory or tmp_path / "tiny"))
    assert facts.servable
    assert facts.spec.family == "qwen3_moe"
    with pytest.raises(ValueError, match=r"'nothing' is no model directory.*qwen3-30b-a3b, "):
        model_facts("nothing")
