"""What a deployment's backend decides: the cache's dtype, the dtypes it refuses, how ranks wait, what reruns how."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crosspool.config import DeploymentConfig, ModelConfig, SchedulingConfig
from crosspool.deployment.engine_and_cluster import cluster_config, engine_config
from crosspool.deployment.prepared_model import prepare_models
from crosspool.errors import CrossPoolError
from crosspool.pools_config import PoolsConfig
from tests.support.tiny_models import write_tiny_model


def deployment(path, backend, dtype="auto"):
    return DeploymentConfig(
        models=(ModelConfig(source=str(path)),), pools=PoolsConfig(backend=backend, num_weights_ranks=2), dtype=dtype
    )


@pytest.mark.parametrize(("backend", "kv_dtype"), [("numpy", "float32"), ("cuda", "bfloat16")])
def test_the_cache_has_the_backends_dtype(backend, kv_dtype, tmp_path):
    path = write_tiny_model(tmp_path / "tiny", "qwen3_moe")
    (model,) = prepare_models(deployment(path, backend))
    assert model.served.kv_dtype == kv_dtype


def test_gpus_follow_the_ranks_and_ranks_look_at_their_gpus(tmp_path):
    config = cluster_config(deployment(tmp_path, "cuda"))
    assert config.backend == "cuda"
    assert config.device_of == {"kv0": 0, "w0": 1, "w1": 2}
    assert config.spin_us > cluster_config(deployment(tmp_path, "numpy")).spin_us
    half = replace(deployment(tmp_path, "cuda"), scheduling=SchedulingConfig(prefill_share=0.5))
    assert (config.prefill_share, cluster_config(half).prefill_share) == (0.7, 0.5)


def test_ranks_of_gpus_cross_as_asked_and_meet_under_a_token_of_their_deployment(tmp_path):
    config = deployment(tmp_path, "cuda")
    assert cluster_config(config).transport == "auto"
    by_nvshmem = replace(config, pools=replace(config.pools, transport="nvshmem"))
    configs = [cluster_config(by_nvshmem) for _ in range(2)]
    assert [config.transport for config in configs] == ["nvshmem"] * 2
    assert len({config.token for config in configs}) == 2


@pytest.mark.parametrize(
    ("backend", "layout", "num_hosts"), [("numpy", "inprocess", 1), ("numpy", "processes", 3), ("cuda", "inprocess", 3)]
)
def test_numpy_ranks_of_one_process_share_a_thread(backend, layout, num_hosts, tmp_path):
    config = deployment(tmp_path, backend)
    config = cluster_config(replace(config, pools=replace(config.pools, layout=layout)))
    assert len(config.all_hosts) == num_hosts


def test_prompts_of_shapes_that_chunks_do_not_take_run_in_the_pools(tmp_path):
    config = deployment(write_tiny_model(tmp_path / "narrow", "qwen3_moe", head_dim=24), "cuda")
    config = replace(config, pools=replace(config.pools, prefill="dedicated"))
    (model,) = prepare_models(config)
    assert model.served.prefill_ranks == ()
    write_tiny_model(tmp_path / "usual", "qwen3_moe")
    (model,) = prepare_models(replace(config, models=(ModelConfig(source=str(tmp_path / "usual")),)))
    assert model.served.prefill_ranks == ("p0",)


@pytest.mark.parametrize(("backend", "wrong"), [("numpy", "bfloat16"), ("cuda", "float32")])
def test_a_dtype_of_the_other_backend_is_refused(backend, wrong, tmp_path):
    with pytest.raises(CrossPoolError, match=f"dtype is {wrong}; .* so use auto or"):
        cluster_config(deployment(tmp_path, backend, wrong))


@pytest.mark.parametrize(("backend", "rerun_tokens"), [("numpy", 0), ("cuda", 32)])
def test_generated_tokens_run_again_by_decodes_kernels_where_a_prompts_have_other_bits(backend, rerun_tokens, tmp_path):
    config = deployment(tmp_path, backend)
    config = replace(config, scheduling=SchedulingConfig(max_num_batched_tokens=8192))
    assert engine_config(config).rerun_tokens == rerun_tokens
    assert not engine_config(config).batch_invariant
    apart = SchedulingConfig(batch_invariant=True, enable_prefix_caching=False)
    assert engine_config(replace(config, scheduling=apart)).batch_invariant


def test_a_context_above_the_models_own_is_told(tmp_path, caplog):
    path = write_tiny_model(tmp_path / "tiny", "qwen3_moe", max_position_embeddings=128)
    config = deployment(path, "numpy")
    for limit, told in ((128, False), (129, True)):
        caplog.clear()
        (model,) = prepare_models(replace(config, models=(replace(config.models[0], max_model_len=limit),)))
        assert model.served.model_limit == 128
        assert ("max_model_len is 129 for tiny, whose own limit is 128 tokens" in caplog.text) == told
