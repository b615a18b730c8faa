"""How one model's KV lies over the KV ranks, and how much of the pool one of its requests can use.

Attention whose heads divide over the ranks is cut by heads; everything else (MLA, MQA, few KV heads) is cut by tokens,
every n-th page on a rank, and partial attention is merged. Either way one request sees the whole pool. On one rank
there is nothing to cut.
"""

from typing import Literal

from crosspool.planner.facts import ModelFacts

KVParallelism = Literal["one", "heads", "tokens"]
Wanted = Literal["auto", "one", "heads", "tokens"]


def kv_parallelism(facts: ModelFacts, num_kv_ranks: int, wanted: Wanted = "auto") -> KVParallelism:
    """The way to cut; raises ValueError where `heads` is wanted and the heads do not divide."""
    divides = facts.num_kv_heads % num_kv_ranks == 0
    if wanted == "heads" and not divides:
        raise ValueError(
            f"{facts.name} has {facts.num_kv_heads} KV heads, which {num_kv_ranks} KV ranks do not divide; "
            "use kv_parallelism: tokens, or auto"
        )
    if num_kv_ranks == 1 or wanted == "one":
        return "one"
    if wanted == "auto":
        return "heads" if divides else "tokens"
    return wanted


def monolithic_share_seen(num_kv_heads: int, num_gpus: int) -> float:
    """Part of the KV memory one request sees where `num_gpus` GPUs hold a model's weights and KV together.

    With fewer KV heads than GPUs, attention runs as data-parallel replicas of one head a GPU.
    """
    return min(1.0, num_kv_heads / num_gpus)
