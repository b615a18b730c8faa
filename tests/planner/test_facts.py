"""KV bytes: head width, latent caches and windows, and the mistakes that estimators make."""

from __future__ import annotations

import pytest

from crosspool.models.families.registry import spec_from_config
from crosspool.planner.catalogue import catalogue_facts
from crosspool.planner.facts import ModelFacts

GQA = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 10,
    "hidden_size": 1536,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 96,
}
MLA = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "kv_lora_rank": 384,
    "qk_rope_head_dim": 48,
    "qk_nope_head_dim": 96,
    "v_head_dim": 96,
}


def facts(config, name="m"):
    return ModelFacts(name=name, spec=spec_from_config({"torch_dtype": "bfloat16", **config}))


@pytest.mark.parametrize(
    ("config", "kv_bytes", "kind", "mistakes"),
    [(GQA, 15360, "GQA", (10240,)), (MLA, 10368, "MLA", (18432, 92160))],
)
def test_a26_planner_counts_kv_as_the_pool_does(config, kv_bytes, kind, mistakes):
    """A26: width is head_dim, not hidden / heads; a latent cache has no factor 2 and is not per head."""
    model = facts(config)
    assert model.kv_bytes_per_token == kv_bytes
    assert model.kv_bytes_per_token == model.spec.kv_bytes_per_token()
    assert model.kv_bytes_per_token not in mistakes
    assert model.attention_kind == kind
    geometry = model.geometry(2 << 20)
    assert geometry.token_layer_bytes * geometry.num_layers == kv_bytes


@pytest.mark.parametrize(
    ("name", "kind", "heads"),
    [("qwen3-30b-a3b", "GQA", 4), ("glm-4.7-flash", "MLA", 1), ("olmoe-1b-7b", "MHA", 16), ("llama-30b", "MHA", 52)],
)
def test_attention_kinds_and_the_heads_a_cache_can_be_cut_by(name, kind, heads):
    model = catalogue_facts(name)
    assert (model.attention_kind, model.num_kv_heads) == (kind, heads)


def test_windows_bound_what_attention_sees_but_not_what_the_pool_keeps():
    """gpt-oss-20b: 12 of 24 layers see the last 128 tokens only; pages hold every token of every layer."""
    model = catalogue_facts("gpt-oss-20b")
    layer = 2 * 8 * 64 * 2
    assert model.visible_kv_bytes(100) == 24 * layer * 100
    assert model.visible_kv_bytes(5000) == 12 * layer * 5000 + 12 * layer * 128
    assert model.kv_bytes_per_token * 5000 == 24 * layer * 5000
    geometry = model.geometry(2 << 20)
    assert geometry.num_pages(5000) * geometry.page_bytes >= 24 * layer * 5000
    assert catalogue_facts("qwen3-30b-a3b").visible_kv_bytes(5000) == 5000 * 98304
