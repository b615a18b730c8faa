"""The surroundings of a rank's loop that a test turns by itself: nobody to ring, and loads that run at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crosspool.cluster.messages import FromRank
from crosspool.cluster.rank_loop import RankSurroundings
from crosspool.scheduler.order import ORDER_POLICIES
from tests.support.loading import start_now


def alone(emit: Callable[[FromRank], None], **changes: Any) -> RankSurroundings:
    """emit: takes what the rank says. changes: of what is not as here."""
    fields: dict[str, Any] = dict(
        ring=lambda peer: lambda: None,
        wake=lambda: None,
        clock=lambda: 0.0,
        order=ORDER_POLICIES["priority"],
        step_deadline_s=1.0,
        start=start_now,
    )
    return RankSurroundings(emit=emit, **(fields | changes))
