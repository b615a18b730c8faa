"""Claims of live sequences on one KV rank's frames, and whether all of these can end.

They can where there is an order in which each gets what it may still ask for, from the free frames and those of the
ones before it: Dijkstra's banker, for one resource.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from crosspool.kv_pool.limits import PoolLimits


@dataclass(slots=True)
class Claim:
    """Frames of one live sequence of `model`: in its block table, expected at its end, and the most it may reach.

    Frames that several sequences use are in a claim of their own, which `is_shared`: they come back with the last of
    these sequences. Here they never do, which errs on the safe side and spares the question of who is the last.
    """

    held: int
    expected: int
    most: int
    model: str = ""
    is_shared: bool = False

    def __post_init__(self) -> None:
        assert 0 <= self.held <= self.expected <= self.most, f"{self} does not ascend"

    @property
    def left(self) -> int:
        """The most it may still ask for."""
        return self.most - self.held

    @property
    def gives_back(self) -> int:
        """Frames that are free once it ends."""
        return 0 if self.is_shared else self.held

    def changed(self, num_frames: int) -> "Claim":
        """The claim with `num_frames` more in its block table, or fewer, and as much left to grow."""
        changed = (self.held + num_frames, self.expected + num_frames, self.most + num_frames)
        return Claim(*changed, self.model, self.is_shared)


def can_all_end(num_free: int, claims: Iterable[Claim]) -> bool:
    """Whether the claims can reach their most one after another, each giving its frames back as it ends.

    Trying them by what is left to grow is enough: whoever can end now only adds to what the next ones have.
    """
    for claim in sorted(claims, key=lambda claim: claim.left):
        if claim.left > num_free:
            return False
        num_free += claim.gives_back
    return True


def can_all_end_within(limits: PoolLimits, claims: Iterable[Claim]) -> bool:
    """The same where floors and ceilings bind too: False where what is held breaks the limits already.

    A model has the frames that nobody holds and no floor keeps, those of its own floor, and never more than its
    ceiling. As before a claim that ends leaves no other one less, so ending whoever can end loses nothing.
    """
    waiting: dict[str, list[Claim]] = {}
    held: dict[str, int] = {}
    for claim in claims:
        waiting.setdefault(claim.model, []).append(claim)
        held[claim.model] = held.get(claim.model, 0) + claim.held
    common = limits.budget - limits.charge(held)
    if common < 0 or any(count > limits.ceiling(model) for model, count in held.items()):
        return False
    for queue in waiting.values():
        queue.sort(key=lambda claim: -claim.left)
    while waiting:
        num_waiting = sum(map(len, waiting.values()))
        for model, queue in list(waiting.items()):
            floor, ceiling = limits.floor(model), limits.ceiling(model)
            while queue:
                has = held[model]
                if queue[-1].left > min(common + max(0, floor - has), ceiling - has):
                    break
                held[model] -= queue.pop().gives_back
                common += max(has, floor) - max(held[model], floor)
            if not queue:
                del waiting[model]
        if sum(map(len, waiting.values())) == num_waiting:
            return False
    return True
