"""Units and integer arithmetic that every component shares."""

import re

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]i?B?|B)?", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "B": 1, "K": KiB, "M": MiB, "G": GiB}


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


def parse_size(text: str | int) -> int:
    """Bytes of `512MiB`, `2G`, `1.5 GiB` or a plain number. K, M and G are powers of 1024, with or without `i` and `B`.

    Raises ValueError, naming the text, for anything else.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f"{str(text)[:40]!r} is not a size; write bytes, or a number with KiB, MiB or GiB")
    number, unit = match.groups()
    return int(float(number) * _SIZE_UNITS[(unit or "").upper()[:1]])
