"""Large matrix products: cuBLAS through torch, and one product an expert over rows sorted by expert.

On a CPU, for tests, the same results by plain products.
"""

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """(rows, out) bf16 = x (rows, k) weight^T (+ bias); x and weight (out, k) bf16, x rows may be strided."""
    return torch.nn.functional.linear(x, weight, bias)


def linear_into(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out (rows, out) bf16 = x (rows, k) weight^T, contiguous."""
    torch.mm(x, weight.t(), out=out)


def linear_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(rows, out) fp32 = x weight^T of bf16 values: exact products, fp32 sums."""
    if x.device.type == "cuda":
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.float().t()


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """(rows, out) bf16: rows [ends[e - 1], ends[e]) of x (rows, k) times weight[e]^T; weight (experts, out, k).

    ends: (experts) int32, on the device: how many rows an expert has is never known to the host.
    """
    if x.device.type == "cuda":
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
    out = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        out[start:end] = linear(x[start:end], weight[expert])
        start = end
    return out


def exact_parts(weight: torch.Tensor) -> torch.Tensor:
    """(parts * rows, k) bf16 whose parts add up to `weight` (rows, k) fp32: 3 for any, 1 where it is bf16 already.

    So a router's fp32 logits come from the matrix units: x is bf16, products are exact and sums are fp32.
    """
    parts, rest = [], weight.float()
    for _ in range(3):
        part = rest.bfloat16()
        parts.append(part)
        rest = rest - part.float()
        if not bool(rest.any()):
            break
    return torch.cat(parts).contiguous()
