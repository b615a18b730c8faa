"""What a deployment asks of this machine and of its models' shapes, looked at before any process starts."""

import os
from collections.abc import Mapping, Sequence
from ctypes.util import find_library
from importlib.util import find_spec

from crosspool.backends.cuda.device.gpu_sizes import gpu_sizes
from crosspool.cluster.checks import check_devices
from crosspool.cluster.config import ClusterConfig
from crosspool.errors import CrossPoolError
from crosspool.models.spec import DenseFFNSpec, ModelSpec
from crosspool.pools_config import PoolsConfig
from crosspool.units import GiB, format_bytes
from crosspool.weights_pool.placement import intermediate_slices

BACKEND_PACKAGES = {"numpy": (), "cuda": ("torch", "triton")}


def check_machine(pools: PoolsConfig, memory_bytes: int | None = None) -> None:
    """memory_bytes: of this machine, found out if None.

    Raises CrossPoolError where a package is missing, or where what the pools keep in this machine's memory is larger.
    """
    missing = [name for name in BACKEND_PACKAGES[pools.backend] if find_spec(name) is None]
    if missing:
        raise CrossPoolError(
            f"backend is {pools.backend} and {' and '.join(missing)} cannot be found; "
            f"pip install 'crosspool[{pools.backend}]', or use backend numpy"
        )
    if pools.transport == "nvshmem" and not _has_nvshmem():
        raise CrossPoolError(
            "transport is nvshmem and its library cannot be found; pip install nvidia-nvshmem-cu13, or leave it out"
        )
    have = physical_memory_bytes() if memory_bytes is None else memory_bytes
    parts = {"kv_pool_bytes": pools.kv_pool_bytes} if pools.backend == "numpy" else {}  # else on the GPUs
    if pools.host_pool_bytes:
        parts["host_pool_bytes"] = pools.host_pool_bytes
    if have is not None and sum(parts.values()) * pools.num_kv_ranks > have:
        ranks = f" on each of {pools.num_kv_ranks} KV ranks" if pools.num_kv_ranks > 1 else ""
        sizes = " and ".join(f"{name} is {num_bytes / GiB:.1f} GiB" for name, num_bytes in parts.items())
        beside = " and the weights" if pools.backend == "numpy" else ""
        raise CrossPoolError(
            f"{sizes}{ranks}, and this machine has {have / GiB:.1f} GiB of memory for that{beside}; set less"
        )


def check_gpus(cluster: ClusterConfig, num_gpus: int | None = None) -> None:
    """num_gpus: of this machine, found out if None. Raises CrossPoolError where a rank is placed on one beyond them.

    Ranks within this process look for themselves: the driver must not start here before they have set it up.
    """
    if cluster.backend != "cuda" or cluster.layout != "processes":
        return
    sizes = gpu_sizes() if num_gpus is None else None
    have = num_gpus if sizes is None else len(sizes)
    if have is not None:
        try:
            check_devices(cluster.device_of, have)
        except ValueError as error:
            raise CrossPoolError(str(error)) from None


def host_bytes_for_models(pools: PoolsConfig, memory_bytes: int | None = None) -> int | None:
    """Host memory that each prefill rank of GPUs may fill with whole models; None: no such rank, or nobody tells.

    memory_bytes: of this machine, found out if None.
    """
    if pools.backend != "cuda" or pools.prefill != "dedicated":
        return None
    have = physical_memory_bytes() if memory_bytes is None else memory_bytes
    return None if have is None else max(0, have - _host_pools(pools)) // pools.num_prefill_ranks


def check_whole_models(pools: PoolsConfig, sizes: Mapping[str, int], memory_bytes: int | None = None) -> None:
    """sizes: of each model whole, which every prefill rank of GPUs keeps in host memory, beside the host pool.

    memory_bytes: of this machine, found out if None. Raises CrossPoolError where it has less, or where a prefill rank's
    GPU has less for one of them.
    """
    have = physical_memory_bytes() if memory_bytes is None else memory_bytes
    room = host_bytes_for_models(pools, have)
    if room is None:
        return
    for name, size in sizes.items():
        if pools.prefill_pool_bytes is not None and size > pools.prefill_pool_bytes:
            raise CrossPoolError(
                f"{name} takes {format_bytes(size)} whole and prefill_pool_bytes is "
                f"{format_bytes(pools.prefill_pool_bytes)}; set at least {format_bytes(size)}, or prefill inline"
            )
    num_bytes, beside = sum(sizes.values()), _host_pools(pools)
    if num_bytes > room:
        assert have is not None
        pool = f" beside host pools of {beside / GiB:.1f} GiB" if beside else ""
        raise CrossPoolError(
            f"prefill is dedicated, and each of {pools.num_prefill_ranks} prefill ranks keeps all models in host "
            f"memory, {num_bytes / GiB:.1f} GiB{pool}; this machine has {have / GiB:.1f} GiB: "
            "serve fewer, or use inline"
        )


def _host_pools(pools: PoolsConfig) -> int:
    return pools.host_pool_bytes * pools.num_kv_ranks


def _has_nvshmem() -> bool:
    """As a Python package, or where the system looks for libraries."""
    try:
        is_package = find_spec("nvidia.nvshmem") is not None
    except ModuleNotFoundError:
        is_package = False
    return is_package or find_library("nvshmem_host") is not None


def physical_memory_bytes() -> int | None:
    """None where the system does not tell."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_slices(spec: ModelSpec, num_ranks: int, shares: Sequence[float] = ()) -> None:
    """Raises ValueError where one of the model's FFNs is too narrow to be cut over so many weights ranks.

    shares: relative widths of the slices; none: equal ones.
    """
    for width in ffn_widths(spec):
        intermediate_slices(width, num_ranks, shares or None)


def ffn_widths(spec: ModelSpec) -> set[int]:
    """The intermediate sizes of all FFNs: dense ones, experts and shared experts."""
    widths = set()
    for layer in spec.layers:
        ffn = layer.ffn
        if isinstance(ffn, DenseFFNSpec):
            widths.add(ffn.intermediate_size)
            continue
        widths.add(ffn.expert_intermediate_size)
        if ffn.shared is not None:
            widths.add(ffn.shared.intermediate_size)
    return widths
