"""Between projection and attention: QK norms, rotation, and the write of keys and values into the cache."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.params import (
    GqaInput,
    GqaRopeParams,
    MlaInput,
    MlaRopeParams,
    RopeTableParams,
    RopeView,
    address,
    check,
)
from crosspool.backends.cuda.kv_frames.cache import PagedCache
from crosspool.models.rope import attention_factor, inv_freq
from crosspool.models.spec import GQASpec, MLASpec, RopeSpec
from crosspool.units import ceil_div

_WARPS = 4


@lru_cache(maxsize=256)
def _inv_freq_on(spec: RopeSpec, device: torch.device) -> torch.Tensor:
    """Of `RopeTable`; read only. Brought to the device once, while a model loads.

    NOTE: the copy blocks the host. Within a step that stood still where the host's other rank was to launch next.
    """
    return torch.from_numpy(inv_freq(spec)).to(device)


@dataclass(frozen=True)
class RopeTable:
    """cos and sin of a step's tokens, made once a step and shared by all layers of one RopeSpec."""

    spec: RopeSpec
    inv_freq: torch.Tensor  # (dim / 2) float64, so that angles stay exact at a million tokens
    cos_sin: torch.Tensor  # (tokens, dim / 2, 2) fp32, the attention factor included

    @classmethod
    def allocate(cls, spec: RopeSpec, tokens: int, device: torch.device) -> "RopeTable":
        table = torch.zeros(tokens, spec.dim // 2, 2, dtype=torch.float32, device=device)
        return cls(spec, _inv_freq_on(spec, device), table)

    def update(self, kernels: Launcher, positions: torch.Tensor, *, overlap: bool = True) -> None:
        """positions: (tokens) int32, at most as many as allocated."""
        tokens = len(positions)
        check("positions", positions, (tokens,), torch.int32)
        if tokens > len(self.cos_sin):
            raise ValueError(f"{tokens} positions; the table was allocated for {len(self.cos_sin)}")
        params = RopeTableParams(
            inv_freq=address(self.inv_freq),
            positions=address(positions),
            cos_sin=address(self.cos_sin),
            factor=attention_factor(self.spec),
            half=self.spec.dim // 2,
        )
        kernels.launch(
            "rope", "rope_table", grid=(tokens, 1, 1), threads=64, smem_bytes=0, params=params, overlap=overlap
        )

    def view(self) -> RopeView:
        return RopeView(cos_sin=address(self.cos_sin), rope_dim=self.spec.dim, interleaved=self.spec.interleaved)


def gqa_input(
    spec: GQASpec,
    rope: RopeTable,
    qkv: torch.Tensor,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> GqaInput:
    """qkv: (tokens, (heads + 2 kv_heads) * head_dim) bf16, as projected."""
    tokens = qkv.shape[0]
    check("qkv", qkv, (tokens, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim), torch.bfloat16)
    return GqaInput(
        qkv=address(qkv),
        q_norm=address(q_norm),
        k_norm=address(k_norm),
        rope=rope.view(),
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        norm_full=spec.qk_norm == "full",
        eps=eps,
    )


def mla_input(
    spec: MLASpec,
    rope: RopeTable,
    q_latent: torch.Tensor,
    q: torch.Tensor,
    kv_a: torch.Tensor,
    *,
    kv_a_norm: torch.Tensor,
) -> MlaInput:
    """q_latent: (tokens, heads, kv_lora) bf16, absorbed queries. q: (tokens, heads * (nope + rope)) and kv_a: (tokens,
    kv_lora + rope) bf16 as projected, rows may be strided."""
    tokens = kv_a.shape[0]
    check("q_latent", q_latent, (tokens, spec.num_heads, spec.kv_lora_rank), torch.bfloat16)
    if kv_a.shape[1] != spec.kv_elements_per_token or tuple(q.shape) != (tokens, spec.num_heads * spec.qk_head_dim):
        raise ValueError(f"kv_a {tuple(kv_a.shape)}, q {tuple(q.shape)} do not fit {spec}")
    return MlaInput(
        q_latent=address(q_latent),
        q=address(q),
        kv_a=address(kv_a),
        kv_a_norm=address(kv_a_norm),
        rope=rope.view(),
        q_stride=q.stride(0),
        kv_a_stride=kv_a.stride(0),
        heads=spec.num_heads,
        latent=spec.kv_lora_rank,
        nope=spec.qk_nope_head_dim,
        eps=spec.lora_norm_eps,
    )


def rope_cache(
    kernels: Launcher,
    spec: GQASpec | MLASpec,
    inputs: GqaInput | MlaInput,
    cache: PagedCache,
    layer: int,
    positions: torch.Tensor,
    q: torch.Tensor,
    *,
    table_rows: torch.Tensor | None = None,
) -> None:
    """q = the queries that score cache rows; each token's own row to its slot. Some attention does this itself.

    positions, table_rows: (tokens) int32. q: (tokens, heads, head_dim or kv_lora + rope) bf16.
    """
    tokens = len(positions)
    check("positions", positions, (tokens,), torch.int32)
    params: MlaRopeParams | GqaRopeParams
    if isinstance(spec, MLASpec):
        width, extra = spec.kv_elements_per_token, 2
        longest = max(spec.kv_lora_rank, spec.qk_rope_head_dim)
        name, params = "mla_rope_cache", MlaRopeParams()
    else:
        width, extra, longest = spec.head_dim, 2 * spec.num_kv_heads, spec.head_dim
        name, params = "gqa_rope_cache", GqaRopeParams()
    check("q", q, (tokens, spec.num_heads, width), torch.bfloat16)
    params.input = inputs
    params.positions, params.table_rows, params.q = address(positions), address(table_rows), address(q)
    params.cache = cache.view(layer)
    kernels.launch(
        "rope",
        name,
        grid=(tokens, ceil_div(spec.num_heads + extra, _WARPS), 1),
        threads=_WARPS * 32,
        smem_bytes=_WARPS * longest * 4,
        params=params,
    )
