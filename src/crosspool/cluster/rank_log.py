"""RankLog: how the processes of ranks log: a line a record, with the ranks' names, where the server's own lines go."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crosspool.log_lines import json_formatter, text_formatter


@dataclass(frozen=True, slots=True)
class RankLog:
    """fd: of this process, what its ranks' processes have in place of their standard error; None: this process's."""

    level: str = "warning"
    is_json: bool = False
    fd: int | None = None


WARNINGS = RankLog()
"""What goes wrong."""


def set_up_rank_log(log: RankLog, ranks: Sequence[str]) -> None:
    """In the process of `ranks`: records of this level and above, from all its threads, to its standard error."""
    names = ",".join(ranks)

    def add_rank(logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
        return {**event, "rank": names}

    handler = logging.StreamHandler()
    handler.setFormatter(json_formatter(add_rank) if log.is_json else text_formatter(names))
    logging.basicConfig(level=log.level.upper(), handlers=[handler], force=True)
