"""What a whole model takes on a prefill rank, counted from its spec. That it is what is loaded: test_host_blob.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crosspool.models.directory import read_model_dir
from crosspool.models.tensors import model_tensors, weight_bytes
from crosspool.models.whole_size import GROUP_BYTES, whole_bytes, whole_groups
from crosspool.planner.catalogue import model_facts
from tests.support.tiny_models import write_tiny_model


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "glm-4.7-flash", "deepseek-v2-lite"])
def test_a_published_model_takes_about_its_weights_without_the_head(name):
    spec = model_facts(name).spec
    head = sum(2 * tensor.num_elements for tensor in model_tensors(spec) if tensor.name == "head")
    assert head > 0
    kept = weight_bytes(spec) - head
    assert kept <= whole_bytes(spec) < 1.02 * kept


def test_groups_are_the_models_own_first_then_its_layers_in_whole_huge_pages(tmp_path):
    spec = read_model_dir(write_tiny_model(tmp_path / "m", "qwen3_moe", tokenizer=False)).spec
    groups = whole_groups(spec)
    assert list(groups) == [None, *range(spec.num_layers)]
    assert all(size % GROUP_BYTES == 0 and size > 0 for size in groups.values())
    untied = replace(spec, tie_word_embeddings=not spec.tie_word_embeddings)
    assert whole_bytes(untied) == whole_bytes(spec), "the head is not kept"
