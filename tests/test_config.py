"""The deployment's frozen data: sizes, bounds, names."""

from __future__ import annotations

from typing import Any

import pytest

from crosspool.config import DeploymentConfig, ModelConfig, SchedulingConfig, ServerConfig
from crosspool.engine.config import EngineConfig
from crosspool.pools_config import PoolsConfig
from crosspool.units import GiB, KiB, MiB, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (5, 5),
        ("5", 5),
        ("5B", 5),
        ("2K", 2 * KiB),
        ("64KiB", 64 * KiB),
        ("512 MiB", 512 * MiB),
        ("1.5gib", 3 * GiB // 2),
    ],
)
def test_sizes(text: str | int, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "5 TiB", "-1", "1e9", "five", "5MiBs", "x" * 1000])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size") as error:
        parse_size(text)
    assert len(str(error.value)) < 150


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (PoolsConfig, "frame_bytes", 100),
        (PoolsConfig, "kv_pool_bytes", 2 * MiB),
        (PoolsConfig, "num_weights_ranks", 0),
        (SchedulingConfig, "max_num_seqs", 0),
        (SchedulingConfig, "max_queue", 0),
        (SchedulingConfig, "queue_timeout_s", 0.0),
        (SchedulingConfig, "recovery_timeout_s", -1.0),
        (ServerConfig, "port", 70000),
        (ServerConfig, "shutdown_timeout_s", -1.0),
        (ServerConfig, "max_body_bytes", 10),
        (ServerConfig, "api_keys", ("a", "")),
    ],
)
def test_bounds_are_checked(kind: type, field: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"must|empty"):
        kind(**{field: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host_pool_bytes": 100}, "hold at least two frames of 2097152 bytes"),
        ({"host_pool_bytes": GiB, "backend": "cuda", "kv_backing": "vmm"}, "with kv_backing vmm"),
        ({"host_pool_bytes": GiB, "baseline": "elastic"}, "with baseline elastic"),
        ({"host_pool_bytes": GiB, "kv_backing": "vmm"}, "with kv_backing vmm"),
        ({"host_pool_bytes": -1}, "must be 0, or hold"),
    ],
)
def test_host_memory_for_kv_is_refused_where_nobody_would_use_it(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"host_pool_bytes is {changes['host_pool_bytes']}.*{message}"):
        PoolsConfig(**changes)  # type: ignore[arg-type]


def test_host_memory_for_kv_needs_the_prefix_cache() -> None:
    model, scheduling = ModelConfig(source="/a/x"), SchedulingConfig(enable_prefix_caching=False)
    with pytest.raises(ValueError, match="host_pool_bytes is 1073741824 without enable_prefix_caching"):
        DeploymentConfig(models=(model,), pools=PoolsConfig(host_pool_bytes=GiB), scheduling=scheduling)


@pytest.mark.parametrize("share", [0.0, 0.95, float("nan")])
def test_a_part_of_the_gpu_for_prompts_leaves_some_for_decode(share: float) -> None:
    with pytest.raises(ValueError, match=r"prefill_share is .*between 0\.1 and 0\.9"):
        SchedulingConfig(prefill_share=share)


def test_a_part_of_the_gpu_for_prompts_is_refused_where_there_is_no_gpu() -> None:
    models, half = (ModelConfig(source="/a/x"),), SchedulingConfig(prefill_share=0.5)
    with pytest.raises(ValueError, match=r"prefill_share is 0\.5 with backend numpy, .* leave it out"):
        DeploymentConfig(models=models, scheduling=half)
    assert DeploymentConfig(models=models, scheduling=half, pools=PoolsConfig(backend="cuda")).scheduling is half


def test_prompts_run_alone_only_without_shared_beginnings() -> None:
    with pytest.raises(ValueError, match="--no-enable-prefix-caching"):
        SchedulingConfig(batch_invariant=True)
    assert SchedulingConfig(batch_invariant=True, enable_prefix_caching=False).batch_invariant


def test_names_must_differ_aliases_included() -> None:
    first, second = ModelConfig(source="/a/x"), ModelConfig(source="/b/y", aliases=("x",))
    with pytest.raises(ValueError, match=r"two models are called 'x': /a/x and /b/y"):
        DeploymentConfig(models=(first, second))


def test_the_served_name_is_the_last_part_of_the_path() -> None:
    assert ModelConfig(source="/models/qwen3/").served_name == "qwen3"
    assert ModelConfig(source="/models/qwen3", name="q").served_name == "q"


def test_keys_are_not_in_a_printed_config() -> None:
    assert "sk-secret" not in repr(ServerConfig(api_keys=("sk-secret",)))


def test_defaults_are_the_engines() -> None:
    scheduling, pools, engine = SchedulingConfig(), PoolsConfig(), EngineConfig()
    for field in (
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_queue",
        "num_decode_lanes",
        "num_prefill_lanes",
        "admission",
        "recovery_timeout_s",
        "seed",
    ):
        assert getattr(scheduling, field) == getattr(engine, field), field
    assert (pools.kv_pool_bytes, pools.frame_bytes) == (engine.kv_budget_bytes, engine.frame_bytes)
    assert scheduling.queue_timeout_s == engine.default_deadline_s
    assert scheduling.enable_prefix_caching == engine.prefix_caching


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"backend": "numpy"}, "transport is nvshmem with backend numpy, which has no GPUs; leave it out"),
        ({"layout": "inprocess"}, "layout inprocess and gpus 2 for 2 ranks; .* so use peer"),
        ({"num_gpus": 1}, "layout processes and gpus 1 for 2 ranks; .* so use peer"),
        ({"baseline": "static"}, "with baseline static, where nothing crosses"),
    ],
)
def test_a_transport_that_means_nothing_or_cannot_be_had_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolsConfig(**{"backend": "cuda", "transport": "nvshmem", **fields})


def test_ranks_by_nvshmem_have_a_process_and_a_gpu_each() -> None:
    assert PoolsConfig(backend="cuda", transport="nvshmem", num_gpus=3, num_weights_ranks=2).transport == "nvshmem"
    assert PoolsConfig(backend="cuda", transport="peer", num_gpus=1).transport == "peer"
