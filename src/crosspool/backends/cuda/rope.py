"""Between projection and attention: QK norms, rotation, and the write of keys and values into the cache."""

from dataclasses import dataclass

import torch

from crosspool.backends.cuda.cache import PagedCache
from crosspool.backends.cuda.launch import Launcher
from crosspool.backends.cuda.params import GqaRopeParams, MlaRopeParams, RopeParams, address, check
from crosspool.models.rope import attention_factor, inv_freq
from crosspool.models.spec import GQASpec, MLASpec, RopeSpec
from crosspool.units import ceil_div

_WARPS = 4
_MAX_HEAD = 576


@dataclass(frozen=True)
class Rope:
    """Frequencies of one RopeSpec on the device; float64, so that angles stay exact at a million tokens."""

    spec: RopeSpec
    inv_freq: torch.Tensor

    @classmethod
    def on(cls, spec: RopeSpec, device: torch.device) -> "Rope":
        return cls(spec, torch.from_numpy(inv_freq(spec)).to(device))

    def params(self) -> RopeParams:
        return RopeParams(
            inv_freq=address(self.inv_freq),
            factor=attention_factor(self.spec),
            rope_dim=self.spec.dim,
            interleaved=self.spec.interleaved,
        )


def gqa_rope_cache(
    kernels: Launcher,
    spec: GQASpec,
    rope: Rope,
    cache: PagedCache,
    layer: int,
    qkv: torch.Tensor,
    positions: torch.Tensor,
    q: torch.Tensor,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    table_rows: torch.Tensor | None = None,
) -> None:
    """q = rotated, normed queries; keys and values of every token to its slot.

    qkv: (tokens, (heads + 2 kv_heads) * head_dim) bf16. positions, table_rows: (tokens) int32. q: (tokens, heads,
    head_dim) bf16.
    """
    tokens = qkv.shape[0]
    check("qkv", qkv, (tokens, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim), torch.bfloat16)
    check("q", q, (tokens, spec.num_heads, spec.head_dim), torch.bfloat16)
    check("positions", positions, (tokens,), torch.int32)
    params = GqaRopeParams(
        qkv=address(qkv),
        q_norm=address(q_norm),
        k_norm=address(k_norm),
        positions=address(positions),
        table_rows=address(table_rows),
        q=address(q),
        rope=rope.params(),
        cache=cache.view(layer),
        tokens=tokens,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        norm_full=spec.qk_norm == "full",
        eps=eps,
    )
    heads = spec.num_heads + 2 * spec.num_kv_heads
    kernels.launch(
        "rope",
        "gqa_rope_cache",
        grid=(tokens, ceil_div(heads, _WARPS), 1),
        threads=_WARPS * 32,
        smem_bytes=_WARPS * spec.head_dim * 4,
        params=params,
    )


def mla_rope_cache(
    kernels: Launcher,
    spec: MLASpec,
    rope: Rope,
    cache: PagedCache,
    layer: int,
    kv_a: torch.Tensor,
    q: torch.Tensor,
    positions: torch.Tensor,
    q_latent: torch.Tensor,
    *,
    kv_a_norm: torch.Tensor,
    table_rows: torch.Tensor | None = None,
) -> None:
    """The rope part of `q_latent`; latent (normed) and rope key (rotated) of every token to its slot.

    kv_a: (tokens, kv_lora + rope) bf16, rows may be strided. q: (tokens, heads * (nope + rope)) bf16, rows may be
    strided. q_latent: (tokens, heads, kv_lora + rope) bf16; its latent part is left alone.
    """
    tokens = kv_a.shape[0]
    width = spec.kv_lora_rank + spec.qk_rope_head_dim
    check("q_latent", q_latent, (tokens, spec.num_heads, width), torch.bfloat16)
    check("positions", positions, (tokens,), torch.int32)
    if tuple(kv_a.shape) != (tokens, width) or tuple(q.shape) != (tokens, spec.num_heads * spec.qk_head_dim):
        raise ValueError(f"kv_a {tuple(kv_a.shape)}, q {tuple(q.shape)} do not fit {spec}")
    if spec.qk_rope_head_dim > _MAX_HEAD:
        raise ValueError(f"qk_rope_head_dim is {spec.qk_rope_head_dim}; the kernel takes at most {_MAX_HEAD}")
    params = MlaRopeParams(
        kv_a=address(kv_a),
        kv_a_norm=address(kv_a_norm),
        q=address(q),
        positions=address(positions),
        table_rows=address(table_rows),
        q_latent=address(q_latent),
        rope=rope.params(),
        cache=cache.view(layer),
        kv_a_stride=kv_a.stride(0),
        q_stride=q.stride(0),
        tokens=tokens,
        heads=spec.num_heads,
        latent=spec.kv_lora_rank,
        nope=spec.qk_nope_head_dim,
        eps=spec.lora_norm_eps,
    )
    kernels.launch(
        "rope",
        "mla_rope_cache",
        grid=(tokens, ceil_div(spec.num_heads + 2, _WARPS), 1),
        threads=_WARPS * 32,
        smem_bytes=_WARPS * _MAX_HEAD * 4,
        params=params,
    )
