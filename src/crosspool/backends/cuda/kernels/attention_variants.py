"""Which compiled attention kernel a spec runs on, and how many splits fill the GPU."""

from dataclasses import dataclass, replace

from crosspool.models.spec import GQASpec, MLASpec
from crosspool.units import ceil_div

MAX_SPLITS = 512
SPLIT_GROUP = 4
"""Neighbouring splits that are merged one after another, as csrc/attention.cuh has it."""
_EVEN_SPLITS = 8 * SPLIT_GROUP
_SM_BYTES, _BLOCK_BYTES = 228 * 1024, 1024
"""Shared memory of a multiprocessor (compute capability 9.0), and what each block takes of it beside its own."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One instance of a kernel template: `HeadsAttention` over keys and values, `LatentsAttention` over latents."""

    name: str
    key: int
    value: int
    separate: bool  # values lie beside keys; else they are the keys' first elements
    heads: int  # query heads a block takes
    tile: int = 64
    stages: int = 2
    warps: int = 4
    blocks_per_sm: int = 2
    is_wide: bool = False  # products of warpgroups
    merges: bool = False  # groups of splits, where a block has them all

    @property
    def smem_bytes(self) -> int:
        """The template's SMEM."""
        padding = 0 if self.is_wide else 16  # against bank conflicts, which panels do without
        row = self.key * 2 + padding
        tiles, queries = self.stages * self.tile * row, self.heads * row
        if self.separate:
            return 2 * tiles + queries + self.warps * self.heads * 8
        parts = self.warps // (self.tile // 16)
        scores = parts * self.heads * (self.tile + 4) * 4 + self.heads * (self.tile * 2 + padding)
        arrivals = self.stages * 8 if self.is_wide else 0
        return tiles + queries + scores + self.heads * 12 + self.key * 2 + arrivals

    def shared_bytes(self, tokens: int) -> int:
        """Shared memory of a block. In a batch so much that a multiprocessor takes no more than `blocks_per_sm`.

        Blocks begin where the kernel before leaves room first: with three on some multiprocessors others have one. A
        lone token's short context has fewer blocks, beside which the neighbours' should have room.
        """
        if tokens == 1:
            return self.smem_bytes
        crowding = _SM_BYTES // (self.blocks_per_sm + 1) - _BLOCK_BYTES
        return max(self.smem_bytes, crowding + 16)

    @property
    def ready_name(self) -> str:
        """Of the kernel that finds queries and slots ready."""
        return f"{self.name}_ready"

    def makes_own(self, spec: GQASpec | MLASpec) -> bool:
        """Whether its blocks norm and turn queries and the newest slot themselves: a vector by the lanes of a warp."""
        if isinstance(spec, MLASpec):
            return True
        half, of_lane = spec.rope.dim // 2, self.key // 32
        lanes, rest = divmod(half, of_lane)
        return spec.qk_norm != "full" and rest == 0 and lanes & (lanes - 1) == 0


GQA_VARIANTS: dict[int, tuple[Variant, ...]] = {
    64: (Variant("attention_gqa_d64_h8", 64, 64, True, 8, stages=3),),
    128: (
        Variant("attention_gqa_d128_h8", 128, 128, True, 8),
        Variant("attention_gqa_d128_h16", 128, 128, True, 16),
    ),
    256: (Variant("attention_gqa_d256_h8", 256, 256, True, 8, blocks_per_sm=1),),
}
"""By head_dim, narrowest first."""

MLA_VARIANTS: dict[tuple[int, int], tuple[Variant, ...]] = {
    (512, 64): (
        Variant("attention_mla_l512_r64_h16", 576, 512, False, 16, warps=8, blocks_per_sm=1),
        Variant("attention_mla_l512_r64_h24", 576, 512, False, 24, warps=8, blocks_per_sm=1),
    )
}
"""By (kv_lora_rank, qk_rope_head_dim)."""


def choose_variant(spec: GQASpec | MLASpec) -> Variant | None:
    """The kernel that takes a KV head's query heads in the fewest blocks; None: only the kernel for any shape fits."""
    if isinstance(spec, MLASpec):
        variants = MLA_VARIANTS.get((spec.kv_lora_rank, spec.qk_rope_head_dim), ())
    else:
        variants = GQA_VARIANTS.get(spec.head_dim, ())
    if not variants:
        return None
    group = spec.num_heads // num_kv_heads(spec)
    return min(variants, key=lambda variant: (ceil_div(group, variant.heads), variant.heads))


def widened(variant: Variant, splits: int, blocks: int) -> Variant:
    """The same with products of warpgroups (compute capability 9.0), where it has them: attention over latents.

    Where `blocks` share up to `splits` of a token so that one may have all of a group, it merges them itself.
    """
    if variant.separate:
        return variant
    merges = blocks * (SPLIT_GROUP - 1) < splits
    name = f"{variant.name}_wide_merging" if merges else f"{variant.name}_wide"
    return replace(variant, name=name, is_wide=True, merges=merges)


def num_kv_heads(spec: GQASpec | MLASpec) -> int:
    """KV heads the cache holds; all query heads share MLA's one."""
    return 1 if isinstance(spec, MLASpec) else spec.num_kv_heads


def key_value_dims(spec: GQASpec | MLASpec) -> tuple[int, int]:
    """Width of a query and of a value as the cache sees them."""
    if isinstance(spec, MLASpec):
        return spec.kv_elements_per_token, spec.kv_lora_rank
    return spec.head_dim, spec.head_dim


def num_splits(spec: GQASpec | MLASpec, num_sms: int) -> int:
    """Most splits of a token's slots: those with which a lone token fills the GPU once.

    The same for every batch, so that a token's attention has the same bits in any. Splits that blocks of a batch merge
    in groups are so many that blocks of 4, 8, 16 and 32 tokens have the same number of groups each.
    """
    blocks = num_blocks(spec, 1, num_sms)
    is_even = isinstance(spec, MLASpec) and blocks >= _EVEN_SPLITS
    return blocks // _EVEN_SPLITS * _EVEN_SPLITS if is_even else blocks


def num_blocks(spec: GQASpec | MLASpec, tokens: int, num_sms: int) -> int:
    """Blocks that share each token's splits, so that a batch fills the GPU about once whatever its context."""
    variant = choose_variant(spec)
    if variant is None:
        return max(1, min(8, num_sms // (tokens * spec.num_heads)))
    return max(1, min(MAX_SPLITS, num_sms * variant.blocks_per_sm // (tokens * _blocks_a_split(spec, variant))))


def num_few_splits(spec: GQASpec | MLASpec, splits: int, num_sms: int) -> int:
    """Of `splits`, those that a lone token's short context uses: a block a multiprocessor."""
    variant = choose_variant(spec)
    return splits if variant is None else max(1, min(splits, num_sms // _blocks_a_split(spec, variant)))


def _blocks_a_split(spec: GQASpec | MLASpec, variant: Variant) -> int:
    kv_heads = num_kv_heads(spec)
    return kv_heads * ceil_div(spec.num_heads // kv_heads, variant.heads)
