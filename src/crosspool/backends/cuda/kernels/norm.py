"""Residual stream: embedding or residual, plus the FFN ranks' partial outputs in rank order, then RMSNorm."""

from collections.abc import Sequence

import torch

from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.limits import MAX_HIDDEN
from crosspool.backends.cuda.kernels.params import MAX_PARTIALS, NormParams, address, check


def residual_norm(
    kernels: Launcher,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    normed: torch.Tensor,
    *,
    eps: float,
    partials: Sequence[torch.Tensor] = (),
    token_ids: torch.Tensor | None = None,
    embed: torch.Tensor | None = None,
    overlap: bool = True,
) -> None:
    """residual += partials[0] + partials[1] + ...; normed = RMSNorm(residual) * norm_weight.

    residual: (tokens, hidden) fp32, updated in place. normed: (tokens, hidden) bf16. partials: (tokens, hidden), all
    fp32 or all bf16. token_ids (tokens) int32 and embed (vocab, hidden) bf16: the residual starts from these rows.
    """
    tokens, hidden = residual.shape
    check("residual", residual, (tokens, hidden), torch.float32)
    check("normed", normed, (tokens, hidden), torch.bfloat16)
    check("norm_weight", norm_weight, (hidden,), torch.bfloat16)
    if len(partials) > MAX_PARTIALS:
        raise ValueError(f"{len(partials)} partial outputs; at most {MAX_PARTIALS} ranks may share an FFN")
    for partial in partials:
        check("partial", partial, (tokens, hidden), partials[0].dtype)
    if token_ids is not None:
        check("token_ids", token_ids, (tokens,), torch.int32)
    params = NormParams(
        residual_in=address(residual),
        token_ids=address(token_ids),
        embed=address(embed),
        norm_weight=address(norm_weight),
        residual_out=address(residual) if partials or token_ids is not None else None,
        normed=address(normed),
        hidden=hidden,
        num_partials=len(partials),
        partials_are_float=bool(partials) and partials[0].dtype == torch.float32,
        eps=eps,
    )
    for i, partial in enumerate(partials):
        params.partials[i] = address(partial)
    if hidden % 8 or hidden > MAX_HIDDEN:
        raise ValueError(f"hidden is {hidden}; rows must be multiples of 8, at most {MAX_HIDDEN}")
    kernels.launch(
        "norm", "residual_norm", grid=(tokens, 1, 1), threads=256, smem_bytes=128, params=params, overlap=overlap
    )
