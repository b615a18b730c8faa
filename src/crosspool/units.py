"""Units and integer arithmetic that every component shares."""

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB


def ceil_div(numerator: int, denominator: int) -> int:
    """Smallest integer not below `numerator / denominator`, for `denominator > 0`."""
    return -(-numerator // denominator)


def align_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` not below `value`."""
    return ceil_div(value, multiple) * multiple


def format_bytes(num_bytes: float) -> str:
    """`num_bytes` in the largest binary unit that keeps the number at or above one: `1.5 GiB`."""
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes:.0f} B"
