"""What this machine or a model's shapes cannot give is one line before any process starts."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from crosspool.config import DeploymentConfig, ModelConfig
from crosspool.deployment import preflight
from crosspool.deployment.engine_and_cluster import cluster_config
from crosspool.deployment.launch import start_engine
from crosspool.deployment.prepared_model import prepare_models
from crosspool.errors import CheckpointError, CrossPoolError
from crosspool.pools_config import PoolsConfig
from crosspool.units import GiB
from tests.support.tiny_models import write_tiny_model


def test_a_pool_beyond_the_machines_memory_is_refused_with_both_sizes():
    pools = PoolsConfig(kv_pool_bytes=20 * GiB)
    preflight.check_machine(pools, memory_bytes=20 * GiB)
    with pytest.raises(CrossPoolError, match=r"kv_pool_bytes is 20\.0 GiB, and this machine has 19\.0 GiB"):
        preflight.check_machine(pools, memory_bytes=19 * GiB)
    with pytest.raises(CrossPoolError, match="on each of 2 KV ranks"):
        preflight.check_machine(replace(pools, num_kv_ranks=2), memory_bytes=39 * GiB)
    with pytest.raises(CrossPoolError, match=r"20\.0 GiB and host_pool_bytes is 5\.0 GiB"):
        preflight.check_machine(replace(pools, host_pool_bytes=5 * GiB), memory_bytes=24 * GiB)


def test_of_pools_on_gpus_only_host_memory_is_this_machines(monkeypatch):
    monkeypatch.setattr(preflight, "find_spec", lambda name: name)
    pools = PoolsConfig(backend="cuda", kv_pool_bytes=100 * GiB, host_pool_bytes=5 * GiB)
    preflight.check_machine(pools, memory_bytes=5 * GiB)
    with pytest.raises(CrossPoolError, match=r"^host_pool_bytes is 5\.0 GiB, and this machine has 4\.0 GiB"):
        preflight.check_machine(pools, memory_bytes=4 * GiB)


def test_whole_models_beyond_host_memory_are_refused_where_prefill_ranks_keep_them_there():
    pools = PoolsConfig(backend="cuda", prefill="dedicated", num_prefill_ranks=2)
    preflight.check_whole_models(pools, {"a": 4 * GiB, "b": 6 * GiB}, memory_bytes=20 * GiB)
    assert preflight.host_bytes_for_models(pools, 20 * GiB) == 10 * GiB
    with pytest.raises(
        CrossPoolError, match=r"each of 2 prefill ranks .* 11\.0 GiB; this machine has 20\.0 GiB: serve"
    ):
        preflight.check_whole_models(pools, {"a": 5 * GiB, "b": 6 * GiB}, memory_bytes=20 * GiB)
    with pytest.raises(CrossPoolError, match=r"10\.0 GiB beside host pools of 2\.0 GiB; this machine has 20\.0 GiB"):
        preflight.check_whole_models(replace(pools, host_pool_bytes=2 * GiB), {"a": 10 * GiB}, memory_bytes=20 * GiB)
    preflight.check_whole_models(PoolsConfig(backend="cuda"), {"a": 11 * GiB}, memory_bytes=GiB)
    assert preflight.host_bytes_for_models(PoolsConfig(backend="cuda"), GiB) is None


def test_a_model_larger_than_a_prefill_ranks_room_is_told_before_anything_is_loaded():
    pools = PoolsConfig(backend="cuda", prefill="dedicated", prefill_pool_bytes=5 * GiB)
    preflight.check_whole_models(pools, {"a": 5 * GiB}, memory_bytes=20 * GiB)
    with pytest.raises(
        CrossPoolError, match=r"^b takes 6\.0 GiB whole and prefill_pool_bytes is 5\.0 GiB; set at least"
    ):
        preflight.check_whole_models(pools, {"a": 5 * GiB, "b": 6 * GiB}, memory_bytes=20 * GiB)


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(
        preflight, "find_spec", lambda name: None if name == "torch" else importlib.util.find_spec(name)
    )
    preflight.check_machine(PoolsConfig(), memory_bytes=GiB)
    monkeypatch.setitem(preflight.BACKEND_PACKAGES, "cuda", ("torch", "json"))
    with pytest.raises(CrossPoolError, match=r"torch cannot be found; pip install 'crosspool\[cuda\]'"):
        preflight.check_machine(PoolsConfig(backend="cuda"))


@pytest.mark.parametrize("place", ["package", "system", "nowhere"])
def test_nvshmem_is_looked_for_where_it_may_be_installed(place, monkeypatch):
    def find(name):
        if name != "nvidia.nvshmem":
            return name
        if place == "package":
            return name
        raise ModuleNotFoundError("No module named 'nvidia'")

    monkeypatch.setattr(preflight, "find_spec", find)
    monkeypatch.setattr(preflight, "find_library", lambda name: f"lib{name}.so" if place == "system" else None)
    pools = PoolsConfig(backend="cuda", transport="nvshmem")
    if place != "nowhere":
        preflight.check_machine(pools)
        return
    with pytest.raises(CrossPoolError, match=r"transport is nvshmem .* pip install nvidia-nvshmem-cu13"):
        preflight.check_machine(pools)
    preflight.check_machine(replace(pools, transport="peer"))


def test_the_engine_is_not_started_on_a_machine_that_is_too_small(monkeypatch):
    monkeypatch.setattr(preflight, "physical_memory_bytes", lambda: GiB)
    monkeypatch.setattr(
        "crosspool.deployment.launch.start_cluster", lambda config: pytest.fail("the ranks were started")
    )
    with pytest.raises(CrossPoolError, match="kv_pool_bytes is"):
        start_engine(DeploymentConfig(models=(), pools=PoolsConfig(kv_pool_bytes=2 * GiB)))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_more_weights_ranks_than_an_ffn_has_slices_are_refused(family, tmp_path):
    source = str(write_tiny_model(tmp_path / "tiny", family))

    def prepared(num_ranks: int):
        pools = PoolsConfig(num_weights_ranks=num_ranks)
        return prepare_models(DeploymentConfig(models=(ModelConfig(source=source),), pools=pools))

    (model,) = prepared(1)
    most = min(preflight.ffn_widths(model.served.spec)) // 16
    prepared(most)
    with pytest.raises(CheckpointError, match=f"model tiny: an FFN of width .* use at most {most} weights ranks"):
        prepared(most + 1)


def test_widths_are_those_of_every_kind_of_ffn(tmp_path):
    write_tiny_model(tmp_path / "tiny", "deepseek_v2")
    config = DeploymentConfig(models=(ModelConfig(source=str(tmp_path / "tiny")),))
    spec = prepare_models(config)[0].served.spec
    kinds = {type(layer.ffn).__name__ for layer in spec.layers}
    assert kinds == {"DenseFFNSpec", "MoEFFNSpec"}
    shared = next(layer.ffn.shared for layer in spec.layers if hasattr(layer.ffn, "shared"))
    assert shared is not None
    assert shared.intermediate_size in preflight.ffn_widths(spec)


def test_ranks_on_gpus_that_are_not_there_are_told_in_one_line_before_any_starts(monkeypatch):
    pools = PoolsConfig(backend="cuda", num_gpus=3, prefill="dedicated", kv_pool_bytes=GiB)
    cluster = cluster_config(DeploymentConfig(models=(), pools=pools))
    preflight.check_gpus(cluster, num_gpus=3)
    with pytest.raises(
        CrossPoolError, match=r"^w0 on GPU 1, p0 on GPU 2: this machine has 1 GPU, numbered from 0; set"
    ):
        preflight.check_gpus(cluster, num_gpus=1)
    with pytest.raises(CrossPoolError, match=r"^p0 on GPU 2: this machine has 2 GPUs, .*set gpus or prefill_gpus$"):
        preflight.check_gpus(cluster, num_gpus=2)
    preflight.check_gpus(replace(cluster, layout="inprocess"), num_gpus=1)
    monkeypatch.setattr(preflight, "find_spec", lambda name: name)
    monkeypatch.setattr(preflight, "gpu_sizes", lambda: ())
    with pytest.raises(CrossPoolError, match="this machine has no GPU; use backend numpy"):
        start_engine(DeploymentConfig(models=(), pools=pools))
