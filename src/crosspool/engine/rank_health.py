"""RankHealth: which ranks are down, since when, which models they hold again, and until when requests wait for them."""

from collections.abc import Collection, Iterable


class RankHealth:
    """Ranks are up until an event says otherwise. A request waits for a lost rank at most `recovery_timeout_s`.

    A rank that comes back loads its models one after another: for those that it holds again it is up already.
    """

    def __init__(self, recovery_timeout_s: float) -> None:
        self.recovery_timeout_s = recovery_timeout_s
        self.down_since_s: dict[str, float] = {}
        self.holds_again: dict[str, set[str]] = {}  # models, by rank that is down for others
        self.reasons: dict[str, str] = {}
        self.given_up: set[str] = set()  # the cluster no longer tries to bring these back
        self.num_lost = 0

    @property
    def any_down(self) -> bool:
        return bool(self.down_since_s)

    def lost(self, rank: str, reason: str, now: float) -> None:
        """A rank that is lost again while down keeps its first moment, so that the wait stays bounded."""
        self.num_lost += 1
        self.down_since_s.setdefault(rank, now)
        self.holds_again.pop(rank, None)
        self.reasons[rank] = reason

    def failed(self, rank: str, error: str, now: float) -> None:
        """The rank stays lost: waiting for it ends now."""
        self.down_since_s.setdefault(rank, now)
        self.holds_again.pop(rank, None)
        self.reasons[rank] = error
        self.given_up.add(rank)

    def back(self, rank: str, model: str) -> None:
        """A rank that is down for other models serves this one."""
        if rank in self.down_since_s:
            self.holds_again.setdefault(rank, set()).add(model)

    def ready(self, rank: str) -> None:
        self.down_since_s.pop(rank, None)
        self.holds_again.pop(rank, None)
        self.reasons.pop(rank, None)
        self.given_up.discard(rank)

    def is_down(self, rank: str, model: str) -> bool:
        """Whether the model's steps cannot run on the rank."""
        return rank in self.down_since_s and model not in self.holds_again.get(rank, ())

    def are_up(self, ranks: Iterable[str], model: str) -> bool:
        """Whether the model's steps can run on all of `ranks`."""
        return not self.down_since_s or not any(self.is_down(rank, model) for rank in ranks)

    def expires_s(self, ranks: Collection[str], model: str) -> float | None:
        """When requests of the model, which need `ranks`, stop waiting; None while all are up."""
        if not self.down_since_s:
            return None
        ends = [
            since_s + (0.0 if rank in self.given_up else self.recovery_timeout_s)
            for rank, since_s in self.down_since_s.items()
            if rank in ranks and self.is_down(rank, model)
        ]
        return min(ends, default=None)

    def describe(self, ranks: Iterable[str], model: str, now: float) -> str:
        """One line on the first of `ranks` that is down for the model."""
        for rank in ranks:
            if self.is_down(rank, model):
                if rank in self.given_up:
                    return f"rank {rank} could not be brought back: {self.reasons[rank]}"
                down_s = now - self.down_since_s[rank]
                return (
                    f"rank {rank} has been down for {down_s:.1f} s ({self.reasons[rank]}) and did not come back within "
                    f"{self.recovery_timeout_s:g} s"
                )
        return "all ranks are up"
