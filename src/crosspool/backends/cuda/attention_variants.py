"""Which compiled attention kernel a spec runs on, and into how many splits a token's slots go."""

from dataclasses import dataclass, replace

from crosspool.backends.cuda.launch import Launcher
from crosspool.models.spec import GQASpec, MLASpec
from crosspool.units import ceil_div

MAX_SPLITS = 512
MAX_CLUSTERS = 32
"""Clusters that may share a token's slots."""

_CLUSTER_SIZES = (8, 4, 2, 1)
_ENOUGH = 0.85
"""A larger cluster is taken where it leaves at least so much of the device's blocks at work: it merges faster."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One instance of the kernel template `Attention<key, value, separate, heads / 8, tile, stages, warps, ...>`."""

    name: str
    key: int
    value: int
    separate: bool  # values lie beside keys; else they are the keys' first elements
    heads: int  # query heads a block takes
    tile: int = 64
    stages: int = 3
    warps: int = 4
    blocks_per_sm: int = 2
    merges: bool = False  # the blocks of a cluster merge their splits; else a second kernel does

    @property
    def source(self) -> str:
        return "attention_cluster" if self.merges else "attention"

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def smem_bytes(self) -> int:
        """The template's SMEM."""
        k_row = self.key * 2 + 16
        v_row = self.value * 2 + 16 if self.separate else 0
        parts = self.warps // (self.tile // 16)
        scores = parts * self.heads * (self.tile + 4) * 4 + self.heads * (self.tile * 2 + 16)
        newest = (self.key + (self.value if self.separate else 0)) * 2
        work = max(scores, self.warps * self.value * 4)
        tiles = self.stages * (self.tile * (k_row + v_row) + 8)
        return tiles + self.heads * (k_row + 4) + work + newest


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Splits of each token's slots: `clusters` of `size` blocks each, for every group of heads."""

    clusters: int
    size: int = 1

    @property
    def splits(self) -> int:
        return self.clusters * self.size


GQA_VARIANTS: dict[int, tuple[Variant, ...]] = {
    64: (Variant("attention_gqa_d64_h8", 64, 64, True, 8, stages=4),),
    128: (
        Variant("attention_gqa_d128_h8", 128, 128, True, 8),
        Variant("attention_gqa_d128_h16", 128, 128, True, 16, stages=2),
    ),
    256: (Variant("attention_gqa_d256_h8", 256, 256, True, 8, blocks_per_sm=1),),
}
"""By head_dim, narrowest first."""

MLA_VARIANTS: dict[tuple[int, int], tuple[Variant, ...]] = {
    (512, 64): (
        Variant("attention_mla_l512_r64_h16", 576, 512, False, 16, stages=2, warps=8, blocks_per_sm=1),
        Variant("attention_mla_l512_r64_h24", 576, 512, False, 24, stages=2, warps=8, blocks_per_sm=1),
    )
}
"""By (kv_lora_rank, qk_rope_head_dim)."""


def choose_variant(spec: GQASpec | MLASpec, *, merges: bool = False) -> Variant | None:
    """The kernel that takes a KV head's query heads in the fewest blocks; None: only the kernel for any shape fits.

    merges: the one for GPUs with clusters.
    """
    if isinstance(spec, MLASpec):
        variants = MLA_VARIANTS.get((spec.kv_lora_rank, spec.qk_rope_head_dim), ())
    else:
        variants = GQA_VARIANTS.get(spec.head_dim, ())
    if not variants:
        return None
    group = spec.num_heads // num_kv_heads(spec)
    chosen = min(variants, key=lambda variant: (ceil_div(group, variant.heads), variant.heads))
    if not merges:
        return chosen
    if isinstance(spec, MLASpec):  # smaller tiles, more of them on their way
        return replace(chosen, name=f"{chosen.name}_merged", tile=32, stages=4, merges=True)
    return replace(chosen, name=f"{chosen.name}_merged", merges=True)


def num_kv_heads(spec: GQASpec | MLASpec) -> int:
    """KV heads the cache holds; all query heads share MLA's one."""
    return 1 if isinstance(spec, MLASpec) else spec.num_kv_heads


def key_value_dims(spec: GQASpec | MLASpec) -> tuple[int, int]:
    """Width of a query and of a value as the cache sees them."""
    if isinstance(spec, MLASpec):
        return spec.kv_elements_per_token, spec.kv_lora_rank
    return spec.head_dim, spec.head_dim


def head_blocks(spec: GQASpec | MLASpec, variant: Variant) -> int:
    """Blocks that take the heads of one token's split."""
    kv_heads = num_kv_heads(spec)
    return kv_heads * ceil_div(spec.num_heads // kv_heads, variant.heads)


def plan_splits(kernels: Launcher, spec: GQASpec | MLASpec, tokens: int) -> SplitPlan:
    """Splits of each token's slots, so that a batch fills the GPU about once whatever its context."""
    variant = choose_variant(spec, merges=kernels.is_hopper)
    if variant is None:
        return SplitPlan(max(1, min(8, kernels.num_sms // (tokens * spec.num_heads))))
    groups = tokens * head_blocks(spec, variant)
    if not variant.merges:
        return SplitPlan(max(1, min(MAX_SPLITS, kernels.num_sms * variant.blocks_per_sm // groups)))
    plans = []
    for size in _CLUSTER_SIZES:
        held = kernels.max_clusters(
            variant.source, variant.name, threads=variant.threads, smem_bytes=variant.smem_bytes, size=size
        )
        plans.append(SplitPlan(min(MAX_CLUSTERS, held // groups), size))
    most = max(plan.splits for plan in plans)
    if most == 0:  # more tokens than the GPU holds blocks
        return SplitPlan(1)
    return next(plan for plan in plans if plan.splits >= _ENOUGH * most)
