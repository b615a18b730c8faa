"""Cache rows side by side for a piece's attention, and what spans leave to be merged."""

import torch

from crosspool.backends.cuda.chunks.prefill_blocks import Span
from crosspool.backends.cuda.chunks.row_launch import launch_rows
from crosspool.backends.cuda.chunks.span_attention import Part
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.chunk_params import GatherSlotsParams, MergePartParams
from crosspool.backends.cuda.kernels.params import address
from crosspool.backends.cuda.kv_frames.cache import PagedCache
from crosspool.backends.cuda.loading.attention_weights import MLAWeights
from crosspool.models.spec import MLASpec


def gather_slots(
    kernels: Launcher,
    cache: PagedCache,
    layer: int,
    table_rows: torch.Tensor,
    positions: torch.Tensor,
    dtype: torch.dtype,
    room: torch.Tensor | None = None,
) -> torch.Tensor:
    """(keys, elements of a slot): cache rows side by side, in `room` where that is given."""
    geometry = cache.geometry
    slots = len(positions)
    width = geometry.elements_per_token_layer
    out = torch.empty(slots, width, dtype=dtype, device=cache.frames.device) if room is None else room
    params = GatherSlotsParams(
        cache=cache.view(layer),
        table_rows=address(table_rows),
        positions=address(positions),
        out=address(out),
        slots=slots,
    )
    launch_rows(kernels, "gather_slots", slots, params)
    return out


def expand(
    spec: MLASpec,
    weights: MLAWeights,
    slots: torch.Tensor,
    room: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (heads, count, nope + rope) and values (heads, count, v) of cache rows (count, latent + rope), in `room`."""
    heads, nope = spec.num_heads, spec.qk_nope_head_dim
    latents = slots[:, : spec.kv_lora_rank].expand(heads, -1, -1)
    keys, values = room or (
        torch.empty(heads, len(slots), width, dtype=slots.dtype, device=slots.device)
        for width in (spec.qk_head_dim, spec.v_head_dim)
    )
    torch.bmm(latents, weights.key_up, out=keys[:, :, :nope])
    keys[:, :, nope:] = slots[:, spec.kv_lora_rank :]
    torch.bmm(latents, weights.value_up.transpose(1, 2), out=values)
    return keys, values


def held_sums(q: torch.Tensor, tokens: int, heads: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Unnormalised outputs (tokens, heads, width) and (maximum, sum) of softmax (tokens, heads, 2)."""
    acc = torch.empty(tokens, heads, width, dtype=torch.float32, device=q.device)
    return acc, torch.empty(tokens, heads, 2, dtype=torch.float32, device=q.device)


def merge_span(kernels: Launcher, part: Part, span: Span, held: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Take a span's attention into what is held for its stretch's rows."""
    out, log_sums = part
    acc, sums = (tensor[span.stretch.first_row :] for tensor in held)
    rows, heads, width = span.stretch.num_rows, acc.shape[1], acc.shape[2]
    params = MergePartParams(
        part=address(out),
        log_sums=address(log_sums),
        acc=address(acc),
        sums=address(sums),
        row_stride=out.stride(0),
        head_stride=out.stride(1),
        log_sums_stride=log_sums.stride(0),
        rows=rows,
        heads=heads,
        width=width,
        is_first=span.first == 0,
    )
    launch_rows(kernels, "merge_part", rows * heads, params)
