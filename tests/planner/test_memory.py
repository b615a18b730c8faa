"""Bytes of each GPU: they add up, slices are the loader's, and what is planned is what workers hold."""

from __future__ import annotations

import pytest

from crosspool.backends.numpy.ffn_worker import NumpyFFNWorker
from crosspool.backends.numpy.kv_worker import NumpyAttentionWorker
from crosspool.cluster.base import ModelPlacement
from crosspool.errors import CapacityError
from crosspool.models.directory import read_model_dir
from crosspool.planner.catalogue import catalogue_facts
from crosspool.planner.deployment import parse_plan_input
from crosspool.planner.facts import ModelFacts
from crosspool.planner.group import GPUSet, smallest_set, split_group
from crosspool.planner.memory import GPUMemory, MemoryFigures, StepBounds, ffn_slice_bytes
from crosspool.planner.planner import plan_deployment
from crosspool.units import GiB, MiB
from tests.support.tiny_models import write_tiny_model

PAPER = ("qwen3-30b-a3b", "glm-4.7-flash", "deepseek-v2-lite")
FIGURES = MemoryFigures()


def paper_models():
    return [catalogue_facts(name) for name in PAPER]


def test_parts_must_add_up_to_the_gpu():
    with pytest.raises(AssertionError, match="do not add up"):
        GPUMemory(rank="kv0", total_bytes=10, parts={"kv_cache": 9})


@pytest.mark.parametrize("num_kv", [1, 2, 3])
def test_every_part_of_every_gpu_is_listed_and_adds_up(num_kv):
    """A42: weights, KV, activation peak, logits, transfer buffers, graphs, runtime and reserve, card by card."""
    gpus = GPUSet(num_gpus=5, memory_bytes=140 * GiB, used_bytes=3 * GiB)
    split = split_group(paper_models(), gpus, num_kv, StepBounds(), FIGURES)
    common = {"activations", "transfer", "graphs", "runtime", "reserve", "in_use_by_others", "free"}
    for gpu in split.gpus:
        own = {"attention_weights", "kv_cache", "logits"} if gpu.rank.startswith("kv") else {"ffn_weights"}
        assert set(gpu.parts) == own | common
        assert sum(gpu.parts.values()) == 140 * GiB
        assert all(size > 0 for name, size in gpu.parts.items() if name != "free")
        assert gpu.parts["in_use_by_others"] == 3 * GiB
    planned = sum(gpu.parts.get("ffn_weights", 0) for gpu in split.gpus)
    routers = sum(model.ffn_bytes for model in paper_models())
    assert routers <= planned <= routers * 1.01


def test_kv_of_the_papers_models_on_an_h200_is_the_known_one():
    """1.41, 2.56 and 4.46 million tokens with about 3 GiB kept back."""
    gpus = GPUSet(num_gpus=2, memory_bytes=int(139.8 * GiB))
    split = split_group(paper_models(), gpus, 1, StepBounds(), FIGURES)
    seen = [split.budget_bytes / model.kv_bytes_per_token / 1e6 for model in paper_models()]
    assert seen == pytest.approx([1.41, 2.56, 4.46], rel=0.01)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_slices_of_all_ranks_are_the_model_and_a_router_for_each(num_ranks):
    facts = catalogue_facts("deepseek-v2-lite")
    router = 26 * 64 * 2048 * 4
    slices = ffn_slice_bytes(facts, num_ranks)
    assert sum(slices) == facts.ffn_bytes + (num_ranks - 1) * router
    if num_ranks == 3:  # 1408 is cut 480, 464, 464; widths differ, so do the bytes
        assert slices[0] > slices[1]
        assert slices[1] == pytest.approx(slices[2], rel=0.01)


def test_a_model_too_narrow_for_the_ranks_is_named():
    with pytest.raises(ValueError, match=r"granite-3\.1-1b-a400m: an FFN of width 512 cannot be cut into 33 slices"):
        ffn_slice_bytes(catalogue_facts("granite-3.1-1b-a400m"), 33)


def test_larger_steps_take_more_memory_for_activations_logits_and_transfer():
    gpus = GPUSet(num_gpus=3, memory_bytes=140 * GiB)
    small = split_group(paper_models(), gpus, 1, StepBounds(), FIGURES)
    bounds = StepBounds(max_num_seqs=64, max_num_batched_tokens=8192)
    large = split_group(paper_models(), gpus, 1, bounds, FIGURES)
    for name in ("activations", "logits", "transfer"):
        assert large.gpus[0].parts[name] > small.gpus[0].parts[name]
    assert large.gpus[0].parts["logits"] == 154880 * 64 * 8
    assert large.budget_bytes < small.budget_bytes


def a42(count, used="0"):
    """61 GB of weights on 80-GB cards, context 16,000, chunk 8,192, vocabulary of about 150,000, 64 sequences."""
    return {
        "gpus": {"kind": "h100-80gb", "memory": "80GB", "count": count, "used": used},
        "models": [{"model": "qwen3-30b-a3b", "context": 16000}],
        "engine": {"max_num_batched_tokens": 8192, "max_num_seqs": 64},
    }


def test_a_plan_for_80_gb_cards_lists_everything_and_keeps_the_context():
    plan = plan_deployment(parse_plan_input(a42(1))).plan
    (gpu,) = plan.groups[0].gpus
    assert gpu.parts["attention_weights"] + gpu.parts["ffn_weights"] == pytest.approx(61.1e9, rel=0.002)
    assert gpu.parts["activations"] > 100 * MiB
    assert gpu.parts["logits"] == 151936 * 64 * 8
    assert plan.groups[0].models[0].longest_context_tokens >= 16000
    two = plan_deployment(parse_plan_input(a42(2))).plan
    assert two.groups[0].models[0].seen_tokens > plan.groups[0].models[0].seen_tokens


def test_cards_that_others_use_offer_less():
    free, used = plan_deployment(parse_plan_input(a42(2))).plan, plan_deployment(parse_plan_input(a42(2, "3GB"))).plan
    frame = free.frame_bytes
    assert used.groups[0].gpus[0].parts["in_use_by_others"] == 3_000_000_000
    lost = free.groups[0].budget_bytes - used.groups[0].budget_bytes
    assert lost == pytest.approx(3e9, abs=2 * frame)


def test_what_cannot_fit_is_refused_with_the_smallest_set_that_can():
    wanted = {"gpus": {"kind": "h100-80gb", "memory": "80GB", "count": 4}, "models": ["deepseek-v3"]}
    with pytest.raises(CapacityError) as caught:
        plan_deployment(parse_plan_input(wanted))
    message = str(caught.value)
    assert "deepseek-v3 needs 1225.4 GiB of FFN; 3 weights ranks of 74.5 GiB" in message
    found = smallest_set(
        [catalogue_facts("deepseek-v3")], GPUSet(num_gpus=1, memory_bytes=80 * 10**9), StepBounds(), FIGURES
    )
    assert found is not None
    assert f"smallest set: {found[0]} KV + {found[1]} weights GPUs" in message
    wanted["gpus"] = {**wanted["gpus"], "count": sum(found), "per_group": sum(found)}
    assert plan_deployment(parse_plan_input(wanted)).plan.num_gpus == sum(found)
    wanted["gpus"] = {**wanted["gpus"], "count": sum(found) - 1, "per_group": sum(found) - 1}
    with pytest.raises(CapacityError):
        plan_deployment(parse_plan_input(wanted))


def test_uneven_slices_are_named_where_they_are_the_reason():
    """2048 over 14 ranks is 10 units of 16 for two of them: 148 GiB there, although the sum would fit."""
    with pytest.raises(CapacityError, match=r"kimi-k2 needs 1896\.3 GiB of FFN, 148\.\d GiB of it on one rank"):
        split_group([catalogue_facts("kimi-k2")], GPUSet(num_gpus=15, memory_bytes=140 * GiB), 1, StepBounds(), FIGURES)


def test_a_model_whose_attention_fits_no_gpu_has_no_smallest_set():
    facts = [catalogue_facts("deepseek-v3")]
    assert smallest_set(facts, GPUSet(num_gpus=1, memory_bytes=16 * GiB), StepBounds(), FIGURES) is None


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss"])
def test_planned_bytes_are_those_that_workers_hold(tmp_path, family):
    """Run the plan, compare: weights and cache of every rank of a small deployment."""
    directory = read_model_dir(write_tiny_model(tmp_path / family, family))
    facts = ModelFacts(name=family, spec=directory.spec)
    frame = 64 * 1024
    wanted = {
        "gpus": {"kind": "h200", "count": 3, "memory": "64MiB", "kv": 1},
        "models": [{"model": str(directory.path), "name": family}],
        "engine": {"frame_bytes": frame},
        "memory": {"runtime": 0, "graphs": 0},
    }
    plan = plan_deployment(parse_plan_input(wanted)).plan
    group, model = plan.groups[0], plan.groups[0].models[0]
    placement = ModelPlacement(
        name=family,
        directory=directory.path,
        hidden_size=facts.spec.hidden_size,
        kv_rank=group.kv_ranks[0],
        weights_ranks=group.weights_ranks,
        page_tokens=model.page_tokens,
        frame_bytes=frame,
    )
    attention = NumpyAttentionWorker(group.budget_bytes_per_rank // frame, frame)
    attention.add_model(placement, lambda loaded, total: None)
    measured = {group.kv_ranks[0]: dict(attention.memory_bytes())}
    for rank in group.weights_ranks:
        worker = NumpyFFNWorker(rank)
        worker.add_model(placement, lambda loaded, total: None)
        measured[rank] = dict(worker.memory_bytes())
    for gpu in group.gpus:
        for kind in ("attention_weights", "ffn_weights", "kv_cache"):
            allowed = 0.01 if kind == "attention_weights" else 0.0  # the backend keeps some norms twice
            planned = gpu.parts.get(kind, 0)
            assert measured[gpu.rank].get(kind, 0) == pytest.approx(planned, rel=allowed, abs=0), (gpu.rank, kind)
