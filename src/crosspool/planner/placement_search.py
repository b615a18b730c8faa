"""Grouping by local search: a first grouping in order of stage times, then moves and swaps while they help.

Deterministic, and quick where the exact program is not: it improves what the solver found in its time, and stands alone
for hundreds of models, where the program gives the bound only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_PASSES = 30
IMPROVES = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One model, scaled: ffn and kv are parts of a group's room (all of it: 1), times lie in [0, 1].

    share: its part of the traffic times the number of groups, so that an even group has 1.
    """

    ffn: float
    kv: float
    times: tuple[float, float]
    share: float


def objective(items: Sequence[Item], groups: Sequence[int], num_groups: int, balance_weight: float) -> float:
    """Sum of the groups' spreads of both times, and the largest group's share."""
    return _Grouping(items, groups, num_groups, balance_weight).objective()


def search(
    items: Sequence[Item], num_groups: int, balance_weight: float, start: Sequence[int] | None = None
) -> list[int] | None:
    """The group of each item, improved from `start` or from an own first grouping; None where that finds no room."""
    first = list(start) if start is not None else first_grouping(items, num_groups)
    if first is None:
        return None
    grouping = _Grouping(items, first, num_groups, balance_weight)
    for _ in range(MAX_PASSES):
        if not (grouping.move_pass() | grouping.swap_pass()):
            break
    return grouping.group_of


def first_grouping(items: Sequence[Item], num_groups: int) -> list[int] | None:
    """Items in order of their times, filled into groups up to an even part of the bytes; then wherever they fit."""
    group_of = [-1] * len(items)
    room = [[0.0, 0.0] for _ in range(num_groups)]
    even = sum(item.ffn for item in items) / num_groups
    group, left = 0, []
    for idx in sorted(range(len(items)), key=lambda idx: (sum(items[idx].times), idx)):
        if room[group][0] >= even and group < num_groups - 1:
            group += 1
        if not _put(items[idx], idx, group, room, group_of):
            left.append(idx)
    for idx in sorted(left, key=lambda idx: (-items[idx].ffn, idx)):
        by_room = sorted(range(num_groups), key=lambda group: (room[group][0], group))
        if not any(_put(items[idx], idx, group, room, group_of) for group in by_room):
            return None
    return group_of


def _put(item: Item, idx: int, group: int, room: list[list[float]], group_of: list[int]) -> bool:
    if room[group][0] + item.ffn > 1 or room[group][1] + item.kv > 1:
        return False
    room[group][0] += item.ffn
    room[group][1] += item.kv
    group_of[idx] = group
    return True


class _Grouping:
    """A grouping and its objective, kept up to date by group."""

    def __init__(self, items: Sequence[Item], groups: Sequence[int], num_groups: int, balance_weight: float) -> None:
        self.items = items
        self.balance_weight = balance_weight
        self.group_of = list(groups)
        self.members: list[set[int]] = [set() for _ in range(num_groups)]
        for idx, group in enumerate(groups):
            self.members[group].add(idx)
        self.spreads = [self._spread(members) for members in self.members]
        self.shares = [self._share(members) for members in self.members]
        self.edges = [self._edges(members) for members in self.members]

    def objective(self) -> float:
        return sum(self.spreads) + self.balance_weight * max(self.shares)

    def move_pass(self) -> bool:
        """Try every item in every other group. Whether anything moved."""
        moved = False
        for idx in range(len(self.items)):
            for target in range(len(self.members)):
                source = self.group_of[idx]
                if target != source and self._may_help(idx):
                    moved |= self._try(source, target, {idx}, set())
        return moved

    def swap_pass(self) -> bool:
        """Try every pair of items of different groups. Whether anything moved."""
        moved = False
        for one in range(len(self.items)):
            for other in range(one + 1, len(self.items)):
                source, target = self.group_of[one], self.group_of[other]
                if source != target and (self._may_help(one) or self._may_help(other)):
                    moved |= self._try(source, target, {one}, {other})
        return moved

    def _try(self, source: int, target: int, leaving: set[int], coming: set[int]) -> bool:
        """Keep the change where both groups fit and the objective falls."""
        groups = {
            source: self.members[source] - leaving | coming,
            target: self.members[target] - coming | leaving,
        }
        spreads = {group: self._spread(members) for group, members in groups.items()}
        gained = sum(self.spreads[group] - spread for group, spread in spreads.items())
        shares = list(self.shares)
        for group, members in groups.items():
            shares[group] = self._share(members)
        gained += self.balance_weight * (max(self.shares) - max(shares))
        if gained <= IMPROVES or not all(self._fits(members) for members in groups.values()):
            return False
        for group, members in groups.items():
            self.members[group], self.spreads[group] = members, spreads[group]
            self.edges[group] = self._edges(members)
            for idx in members:
                self.group_of[idx] = group
        self.shares = shares
        return True

    def _may_help(self, idx: int) -> bool:
        """Only an item at the edge of its group narrows it by leaving, and only the largest group's share counts."""
        group = self.group_of[idx]
        return idx in self.edges[group] or self.shares[group] == max(self.shares)

    def _edges(self, members: set[int]) -> set[int]:
        if not members:
            return set()
        edges = set()
        for stage in (0, 1):
            times = {idx: self.items[idx].times[stage] for idx in members}
            low, high = min(times.values()), max(times.values())
            edges |= {idx for idx, time in times.items() if time in (low, high)}
        return edges

    def _spread(self, members: set[int]) -> float:
        if not members:
            return 0.0
        first = [self.items[idx].times[0] for idx in members]
        second = [self.items[idx].times[1] for idx in members]
        return max(first) - min(first) + max(second) - min(second)

    def _share(self, members: set[int]) -> float:
        return sum(self.items[idx].share for idx in sorted(members))

    def _fits(self, members: set[int]) -> bool:
        return sum(self.items[idx].ffn for idx in members) <= 1 and sum(self.items[idx].kv for idx in members) <= 1
