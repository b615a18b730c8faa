"""Which ranks a deployment has, where they run, and on which of them a model lies: two pools, or a baseline.

A *baseline* is another layout of the same GPUs, served by the same engine and kernels so that both can be measured. It
has as many places (GPUs, or processes on CPUs) and as much KV memory as the two pools of the same settings would have:

    pools     kv0 ...          w0 ...         hidden states cross between them
    static    (kv0 w0 kv2 w2) (kv1 w1)        each model whole at one place, with KV of its own
    elastic   (kv0 w0) (kv1 w1)               each model cut over all places, whose KV all share

In a baseline every model has lanes of its own and nothing orders the models' steps against each other: they take a
place in the order in which they come.
"""

from zlib import crc32

from crosspool.config import DeploymentConfig, ModelConfig
from crosspool.errors import CrossPoolError


def kv_ranks(config: DeploymentConfig) -> tuple[str, ...]:
    return tuple(f"kv{index}" for index in range(_num_kv_ranks(config)))


def weights_ranks(config: DeploymentConfig) -> tuple[str, ...]:
    pools = config.pools
    number = pools.num_weights_ranks if pools.baseline is None else _num_kv_ranks(config)
    return tuple(f"w{index}" for index in range(number))


def hosts(config: DeploymentConfig) -> tuple[tuple[str, ...], ...]:
    """Ranks that share a process; none where each has one of its own."""
    if config.pools.baseline is None:
        return ()
    pairs = list(zip(kv_ranks(config), weights_ranks(config), strict=True))
    places = min(_num_places(config), len(pairs))
    return tuple(tuple(rank for pair in pairs[place::places] for rank in pair) for place in range(places))


def kv_ranks_of(model: ModelConfig, config: DeploymentConfig) -> tuple[str, ...]:
    """Every KV rank of a model, its home first.

    Homes take turns; that of a model beside the deployment's is drawn. A static model has the one rank; raises
    ValueError for one beside the deployment's, since no memory was set aside for it.
    """
    ranks, names = kv_ranks(config), [own.served_name for own in config.models]
    name = model.served_name
    if config.pools.baseline == "static":
        return (ranks[_static_place(name, names)],)
    home = (names.index(name) if name in names else crc32(name.encode())) % len(ranks)
    return ranks[home:] + ranks[:home]


def weights_ranks_of(model: ModelConfig, config: DeploymentConfig) -> tuple[str, ...]:
    ranks = weights_ranks(config)
    if config.pools.baseline == "static":
        return (ranks[_static_place(model.served_name, [own.served_name for own in config.models])],)
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
        return scheduling.num_decode_lanes, scheduling.num_prefill_lanes
    each = max(1, len(config.models)) * (1 if config.pools.baseline == "static" else _num_places(config))
    return each, each


def order(config: DeploymentConfig) -> str:
    """Which ready segment a rank runs next."""
    return "priority" if config.pools.baseline is None else "ticket"


def _num_places(config: DeploymentConfig) -> int:
    return config.pools.num_kv_ranks + config.pools.num_weights_ranks


def _num_kv_ranks(config: DeploymentConfig) -> int:
    if config.pools.baseline is None:
        return config.pools.num_kv_ranks
    return max(1, len(config.models)) if config.pools.baseline == "static" else _num_places(config)


def _static_place(name: str, names: list[str]) -> int:
    if name not in names:
        raise ValueError(
            f"{name} has no memory of its own in baseline static; name it when the server starts, "
            "or serve from two pools"
        )
    return names.index(name)
