"""Teacher-forced decoding on the CUDA backend's kernels, for comparison with `backends/numpy`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from benchmarks.split_model.undivided import UndividedDecoder
from crosspool.backends.cuda.kv_frames.cache import PagedCache
from crosspool.backends.cuda.kv_rank.attention_half import AttentionHalf
from crosspool.backends.cuda.weights_rank.ffn_half import FFNHalf
from crosspool.backends.numpy import layer_router
from crosspool.backends.numpy.router import sigmoid, softmax
from crosspool.kv_pool.geometry import PageGeometry, page_geometry
from crosspool.models.directory import ModelDirectory
from crosspool.weights_pool.loader import load_attention_weights, load_ffn_weights
from tests.backends.cuda.numpy_weights import attention_weights_from_numpy, ffn_weights_from_numpy

FRAME_BYTES = 64 * 1024

TOLERANCE = 2e-2
"""bf16 activations between kernels, rounded once each (2^-9 relative), over three layers of a random model."""

TIE = 4e-3
"""Choice scores (0 to 1) of two experts this close may change places: activations of bf16 move scores as much."""

CLOSE_SHARE = 0.85
"""Positions within the tolerance: at the others bf16 tips a near-tie between experts (router rules have own tests)."""


def shuffled_cache(geometry: PageGeometry, rows: int, tokens: int, device: torch.device, seed: int = 0) -> PagedCache:
    """A cache whose rows have room for `tokens` tokens each, their frames in random order; all bytes NaN."""
    pages = geometry.num_pages(tokens)
    frames = rows * pages * geometry.frames_per_page
    order = (torch.randperm(frames, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    table = torch.tensor(order, dtype=torch.int32, device=device).reshape(rows, pages, geometry.frames_per_page)
    arena = torch.full((frames + 1, geometry.frame_bytes), 0xFF, dtype=torch.uint8, device=device)
    return PagedCache(frames=arena, frame_table=table, geometry=geometry)


def build_decoder(
    kernels,
    directory: ModelDirectory,
    rows: int,
    tokens: int,
    device: torch.device,
    *,
    num_slices=1,
    page_tokens=16,
    fused=False,
) -> UndividedDecoder:
    spec = directory.spec
    geometry = page_geometry(spec, page_tokens=page_tokens, frame_bytes=FRAME_BYTES)
    cache = shuffled_cache(geometry, rows, tokens, device)
    attention = attention_weights_from_numpy(spec, load_attention_weights(directory), device)
    slices = [
        FFNHalf(
            kernels,
            ffn_weights_from_numpy(spec, load_ffn_weights(directory, idx, num_slices), device),
            rows,
            fused=fused,
        )
        for idx in range(num_slices)
    ]
    return UndividedDecoder(AttentionHalf(kernels, spec, attention, cache, rows, one_row_per_sequence=True), slices)


def decode_prompts(
    decoder: UndividedDecoder, prompts: Sequence[Sequence[int]]
) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Feed equally long prompts token by token: residual streams [position][layer], logits [position], on the CPU."""
    half = decoder.attention
    hidden, logits = [], []
    for position in range(len(prompts[0])):
        half.token_ids.copy_(torch.tensor([prompt[position] for prompt in prompts], dtype=torch.int32))
        half.positions.fill_(position)
        half.lengths.fill_(position + 1)
        hidden.append([residual.cpu().clone() for residual in decoder.layers()])
        logits.append(half.logits().cpu().clone())
    return hidden, logits


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected||; infinite where a value is not a number."""
    error = ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
    return error if error == error else float("inf")


def assert_decoded(reference, prompts, hidden, logits) -> None:
    """What `decode_prompts` gave, against the reference: residual streams of every layer, and logits."""
    errors, ties = [], []
    for row, prompt in enumerate(prompts):
        margins: list[np.ndarray] = []
        with choice_margins(margins):
            layers, expected = reference.trace(prompt)
        pairs = [([step[row] for step in logits], expected)]
        pairs += [([step[layer][row] for step in hidden], values) for layer, values in enumerate(layers)]
        errors.append([errors_of(actual, values) for actual, values in pairs])
        ties.append(np.min([np.full(len(prompt), np.inf), *margins], axis=0) < TIE)
    assert_explained(np.array(errors), np.array(ties))


def assert_explained(errors: np.ndarray, ties: np.ndarray) -> None:
    """errors: (rows, tensors, positions); ties: (rows, positions), where the reference nearly chose other experts.

    One row in four may be off further than `CLOSE_SHARE` allows, but only from a near-tie on: once another expert was
    chosen, the layers behind see other keys of that token at every later position.
    """
    off = [row for row in range(len(errors)) if not all(is_close(each) for each in errors[row])]
    assert len(off) <= len(errors) // 4, errors[off]
    for row in off:
        first = int(np.argmax((errors[row] >= TOLERANCE).any(axis=0)))
        assert ties[row, first], (first, errors[row])
        assert np.isfinite(errors[row]).all(), errors[row]


@contextmanager
def choice_margins(found: list[np.ndarray]) -> Iterator[None]:
    """Meanwhile every routed layer of the NumPy backend adds the lead of each token's last choice over the next."""
    route = layer_router.route

    def noting(logits, spec, top_k, choice_bias=None):
        scores = sigmoid(logits) if spec.score == "sigmoid" else softmax(logits)
        ranked = np.sort(np.atleast_2d(scores if choice_bias is None else scores + choice_bias), axis=-1)
        found.append(ranked[:, -top_k] - ranked[:, -top_k - 1])
        return route(logits, spec, top_k, choice_bias)

    layer_router.route = noting
    try:
        yield
    finally:
        layer_router.route = route


def assert_close(actual, expected):
    errors = errors_of(actual, expected)
    assert is_close(errors), errors


def errors_of(actual, expected) -> list[float]:
    return [relative_error(a, torch.from_numpy(e)) for a, e in zip(actual, expected, strict=True)]


def is_close(errors: Sequence[float]) -> bool:
    return bool(np.median(errors) < TOLERANCE / 2 and np.mean(np.array(errors) < TOLERANCE) >= CLOSE_SHARE)
