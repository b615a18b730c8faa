"""Which ranks a deployment has, where they run, and on which of them a model lies: two pools, or a baseline.

A *baseline* is another layout of the same GPUs, served by the same engine and kernels so that both can be measured. It
has as many devices (GPUs, or processes on CPUs) and as much KV memory as the two pools of the same settings would have:

    pools     kv0 ...          w0 ...         hidden states cross between them
    static    (kv0 w0 kv2 w2) (kv1 w1)        each model whole on one device, with KV of its own
    elastic   (kv0 w0) (kv1 w1)               each model cut over all devices, whose KV all share
    on GPUs   (kv0.0 w0.0) (kv0.1 w0.1) (kv1.0 w1.0)   the same, each model whole on one device, a process for each

In a baseline every model has lanes of its own and nothing orders the models' steps against each other: they take a
device in the order in which they come.
"""

from zlib import crc32

from crosspool.cluster.apart import own_rank
from crosspool.config import DeploymentConfig, ModelConfig
from crosspool.errors import CrossPoolError


def kv_ranks(config: DeploymentConfig) -> tuple[str, ...]:
    return tuple(f"kv{index}" for index in range(_num_kv_ranks(config)))


def weights_ranks(config: DeploymentConfig) -> tuple[str, ...]:
    pools = config.pools
    number = pools.num_weights_ranks if pools.baseline is None else _num_kv_ranks(config)
    return tuple(f"w{index}" for index in range(number))


def prefill_ranks(config: DeploymentConfig) -> tuple[str, ...]:
    """None where the pools compute prompts."""
    pools = config.pools
    return tuple(f"p{index}" for index in range(pools.num_prefill_ranks if pools.prefill == "dedicated" else 0))


def hosts(config: DeploymentConfig) -> tuple[tuple[str, ...], ...]:
    """Ranks that share a process; none where each has one of its own."""
    if config.pools.baseline is None:
        by_gpu: dict[int, list[str]] = {}
        for rank, gpu in gpu_of(config).items():
            by_gpu.setdefault(gpu, []).append(rank)
        is_shared = any(len(group) > 1 for group in by_gpu.values())
        return tuple(tuple(by_gpu[gpu]) for gpu in sorted(by_gpu)) if is_shared else ()
    if are_apart(config):
        return tuple(
            (own_rank(kv, slot), own_rank(w, slot))
            for kv, w in zip(kv_ranks(config), weights_ranks(config), strict=True)
            for slot in range(num_slots(config)[kv])
        )
    pairs = list(zip(kv_ranks(config), weights_ranks(config), strict=True))
    num_devices = min(_num_devices(config), len(pairs))
    return tuple(tuple(rank for pair in pairs[device::num_devices] for rank in pair) for device in range(num_devices))


def are_apart(config: DeploymentConfig) -> bool:
    """Whether every model has a process of its own at each of its ranks, as engines that know nothing of each other."""
    return config.pools.baseline == "elastic" and config.pools.backend == "cuda"


def num_slots(config: DeploymentConfig) -> dict[str, int]:
    """By rank: its processes, where models are apart. One at least, for a model that comes later."""
    pairs = zip(kv_ranks(config), weights_ranks(config), strict=True)
    models, num_devices = len(config.models), _num_devices(config)
    return {rank: max(1, len(range(device, models, num_devices))) for device, pair in enumerate(pairs) for rank in pair}


def arenas(config: DeploymentConfig) -> tuple[tuple[str, ...], ...]:
    """KV ranks that share the memory of a device; none where each has its own."""
    if not are_apart(config):
        return ()
    slots = num_slots(config)
    return tuple(tuple(own_rank(rank, slot) for slot in range(slots[rank])) for rank in kv_ranks(config))


def devices(config: DeploymentConfig) -> tuple[tuple[str, int], ...]:
    """(rank, GPU) of the ranks that do not simply have one each, in order. A baseline's device is a GPU."""
    num_devices = _num_devices(config)
    if config.pools.baseline is None:
        own = gpu_of(config)
        return () if list(own.values()) == list(range(len(own))) else tuple(own.items())
    if are_apart(config):
        slots = num_slots(config)
        ranks = [
            (rank, device) for group in (kv_ranks(config), weights_ranks(config)) for device, rank in enumerate(group)
        ]
        return tuple((own_rank(rank, slot), device) for rank, device in ranks for slot in range(slots[rank]))
    groups = (kv_ranks(config), weights_ranks(config))
    return tuple((rank, index % num_devices) for group in groups for index, rank in enumerate(group))


def kv_ranks_of(model: ModelConfig, config: DeploymentConfig) -> tuple[str, ...]:
    """Every KV rank of a model, its home first.

    Homes take turns; that of a model beside the deployment's is drawn. A static model has the one rank; raises
    ValueError for one beside the deployment's, since no memory was set aside for it.
    """
    ranks, names = kv_ranks(config), [own.served_name for own in config.models]
    name = model.served_name
    if config.pools.baseline == "static":
        return (ranks[_static_device(name, names)],)
    home = _device(name, names, len(ranks))
    if are_apart(config):
        return (ranks[home],)
    return ranks[home:] + ranks[:home]


def _device(name: str, names: list[str], num_devices: int) -> int:
    """In turn; that of a model beside the deployment's is drawn."""
    return (names.index(name) if name in names else crc32(name.encode())) % num_devices


def weights_ranks_of(model: ModelConfig, config: DeploymentConfig) -> tuple[str, ...]:
    ranks = weights_ranks(config)
    if config.pools.baseline == "static":
        return (ranks[_static_device(model.served_name, [own.served_name for own in config.models])],)
    if are_apart(config):
        return (ranks[_device(model.served_name, [own.served_name for own in config.models], len(ranks))],)
    return ranks


def kv_bytes_of_each(config: DeploymentConfig) -> int:
    """KV memory of each KV rank: a baseline divides what the KV pool would have."""
    pools = config.pools
    if pools.baseline is None:
        return pools.kv_pool_bytes
    each = pools.kv_pool_bytes * pools.num_kv_ranks // _num_kv_ranks(config)
    if each < 2 * pools.frame_bytes:
        raise CrossPoolError(
            f"kv_pool_bytes is {pools.kv_pool_bytes}, of which each KV rank of baseline {pools.baseline} gets {each}; "
            f"give each two frames of {pools.frame_bytes} bytes"
        )
    return each


def num_lanes(config: DeploymentConfig) -> tuple[int, int]:
    """Lanes for decode and for prefill."""
    scheduling = config.scheduling
    if config.pools.baseline is None:
        own = len(prefill_ranks(config))  # a prefill rank runs one model at a time
        return scheduling.num_decode_lanes, own or scheduling.num_prefill_lanes
    is_whole = config.pools.baseline == "static" or are_apart(config)
    each = max(1, len(config.models)) * (1 if is_whole else _num_devices(config))
    return each, each


def order(config: DeploymentConfig) -> str:
    """Which ready segment a rank runs next."""
    if config.pools.order is not None:
        return config.pools.order
    return "priority" if config.pools.baseline is None else "ticket"


def gpu_of(config: DeploymentConfig) -> dict[str, int]:
    """The GPU of each rank of two pools. Prefill ranks get GPUs of their own, the last ones, unless they are placed.

    Where `gpus` has no room for that, the pools share what is left, one GPU at least, and prefill ranks what there is.
    """
    pools, placed = config.pools, config.pools.prefill_gpus
    ranks, own = (*kv_ranks(config), *weights_ranks(config)), prefill_ranks(config)
    gpus = pools.num_gpus or len(ranks) + (0 if placed else len(own))
    shared = min(len(ranks), gpus if placed else max(1, gpus - len(own)))
    found = {rank: idx % shared for idx, rank in enumerate(ranks)}
    return found | {rank: placed[idx] if placed else (shared + idx) % gpus for idx, rank in enumerate(own)}


def _num_devices(config: DeploymentConfig) -> int:
    """GPUs, or processes on CPUs: of two pools one for each rank, if they are not to share."""
    return config.pools.num_gpus or config.pools.num_kv_ranks + config.pools.num_weights_ranks


def _num_kv_ranks(config: DeploymentConfig) -> int:
    if config.pools.baseline is None:
        return config.pools.num_kv_ranks
    return max(1, len(config.models)) if config.pools.baseline == "static" else _num_devices(config)


def _static_device(name: str, names: list[str]) -> int:
    if name not in names:
        raise ValueError(
            f"{name} has no memory of its own in baseline static; name it when the server starts, "
            "or serve from two pools"
        )
    return names.index(name)
