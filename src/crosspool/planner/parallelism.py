"""How one model's KV lies over the KV ranks, and how much of the pool one of its requests can use.

Attention whose heads divide over the ranks is cut by heads; everything else (MLA, MQA, few KV heads, norms over all
heads) is cut by tokens, every n-th page on a rank, and partial attention is merged. Either way one request sees the
whole pool. On one rank there is nothing to cut. The rule is the one by which a deployment is served.
"""

from crosspool.kv_pool.split import KVSplit, choose_kv_split
from crosspool.planner.facts import ModelFacts
from crosspool.pools_config import KVSplitChoice


def kv_parallelism(facts: ModelFacts, num_kv_ranks: int, wanted: KVSplitChoice = "auto") -> KVSplit:
    """The way to cut; raises ValueError where `heads` is wanted and they cannot be cut evenly."""
    found = choose_kv_split(facts.spec, num_kv_ranks, "auto" if wanted == "heads" else wanted, facts.name)
    if wanted == "heads" and found == "tokens":
        raise ValueError(
            f"{facts.name} has {facts.num_kv_heads} KV heads, which cannot be cut evenly over {num_kv_ranks} KV ranks; "
            "use kv_parallelism: tokens, or auto"
        )
    return found


def monolithic_share_seen(num_kv_heads: int, num_gpus: int) -> float:
    """Part of the KV memory one request sees where `num_gpus` GPUs hold a model's weights and KV together.

    With fewer KV heads than GPUs, attention runs as data-parallel replicas of one head a GPU.
    """
    return min(1.0, num_kv_heads / num_gpus)
