"""Text files, gzipped or not."""

import gzip
import io
from pathlib import Path
from typing import TextIO


def open_text(path: Path) -> TextIO:
    """The file's text, unpacked where it starts like gzip, whatever its name. Raises ValueError if unreadable."""
    try:
        with path.open("rb") as probe:
            is_gzip = probe.read(2) == b"\x1f\x8b"
        if is_gzip:
            return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8-sig", newline="")
        return path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None


def whole_number(text: object, where: str) -> int:
    """`text` as a count of tokens. Raises ValueError that starts with `where` (file, line, column)."""
    try:
        number = float(text)  # type: ignore[arg-type]
        count = int(number)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{where} is {str(text)[:40]!r}; it must be a whole number of 0 or more") from None
    if number != count or number < 0:
        raise ValueError(f"{where} is {str(text)[:40]!r}; it must be a whole number of 0 or more")
    return count


def seconds(text: object, where: str) -> float:
    """`text` as a time of 0 s or more. Raises ValueError that starts with `where`."""
    try:
        number = float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ValueError(f"{where} is {str(text)[:40]!r}; it must be a number of seconds of 0 or more")
    return number
