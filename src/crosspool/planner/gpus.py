"""Kinds of GPU as numbers: memory, bandwidths and latencies that sizes and stage times are computed from."""

from dataclasses import dataclass

from crosspool.units import MiB


@dataclass(frozen=True, kw_only=True, slots=True)
class GPUKind:
    """One kind of GPU. GB are 1e9 bytes.

    memory_bytes: what the driver reports. bandwidth_gb_per_s: what large reads reach, not the data sheet.
    link_gb_per_s: one direction between two GPUs of a node. crossing_s: a small row of hidden states, flag included.
    segment_s: fixed cost of one layer's attention or FFN, beyond reading its bytes.
    measured: whether bandwidths and latencies were measured here; others are data-sheet values times what ours reach.
    """

    name: str
    memory_bytes: int
    bandwidth_gb_per_s: float
    link_gb_per_s: float
    crossing_s: float = 2.75e-6
    segment_s: float = 6.0e-6
    measured: bool = False


GPU_KINDS: dict[str, GPUKind] = {
    kind.name: kind
    for kind in (
        GPUKind(name="a100-40gb", memory_bytes=40960 * MiB, bandwidth_gb_per_s=1380.0, link_gb_per_s=250.0),
        GPUKind(name="a100-80gb", memory_bytes=81920 * MiB, bandwidth_gb_per_s=1800.0, link_gb_per_s=250.0),
        GPUKind(name="h100-80gb", memory_bytes=81559 * MiB, bandwidth_gb_per_s=2970.0, link_gb_per_s=371.0),
        GPUKind(name="h200", memory_bytes=143771 * MiB, bandwidth_gb_per_s=4250.0, link_gb_per_s=371.0, measured=True),
    )
}


def gpu_kind(name: str) -> GPUKind:
    """Raises ValueError listing the kinds for an unknown one."""
    if name not in GPU_KINDS:
        raise ValueError(f"GPU kind {name!r} is unknown; it must be one of {', '.join(GPU_KINDS)}")
    return GPU_KINDS[name]
