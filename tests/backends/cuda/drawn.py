"""Seeded values for kernels on the CPU, and how far results may be off."""

from __future__ import annotations

import torch

CPU = torch.device("cpu")
ROUNDED = 4e-3
"""One rounding of the result to bf16, and of probabilities or activations before a product."""
EXACT = 1e-5
"""fp32 sums of bf16 products."""


def draw(*shape, seed=0, std=1.0):
    return (std * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def nan(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), dtype=dtype)
