"""Garbage is collected between requests, older generations more rarely, and Python's own settings come back."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from crosspool.server import garbage
from crosspool.server.garbage import AGES, FAR, FULL_SHARE, YOUNG, Garbage, rare_collections


class Node:
    """Refers to itself, so that only the collector ends it."""

    def __init__(self) -> None:
        self.me = self


async def test_a_request_leaves_its_garbage_to_the_next_turn() -> None:
    gc.collect()
    with rare_collections():
        made = [weakref.ref(Node()) for _ in range(YOUNG)]
        Garbage().request_ended()
        assert all(ref() is not None for ref in made), "not while the request still ends"
        await asyncio.sleep(0)
        assert all(ref() is None for ref in made)


async def test_a_little_garbage_stays() -> None:
    gc.collect()
    with rare_collections():
        made = weakref.ref(Node())
        Garbage().request_ended()
        await asyncio.sleep(0)
        assert made() is not None
    gc.collect()
    assert made() is None


def test_pythons_thresholds_come_back() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), rare_collections():  # noqa: PT012 (both belong to it)
        assert gc.get_threshold() == (FAR, AGES, AGES)
        raise KeyError
    assert gc.get_threshold() == before


async def test_older_generations_are_rarer_and_full_collections_take_a_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each request leaves enough; the clock stands still but for full collections, which take a second."""
    counts, now_s, done = [YOUNG, 0, 0], 0.0, []

    def collect(generation: int = 2) -> None:
        nonlocal now_s
        done.append(generation)
        counts[: generation + 1] = [YOUNG] + [0] * generation
        if generation < 2:
            counts[generation + 1] += 1
        else:
            now_s += 1.0

    monkeypatch.setattr(garbage.gc, "get_count", lambda: tuple(counts))
    monkeypatch.setattr(garbage.gc, "collect", collect)
    monkeypatch.setattr(garbage.time, "monotonic", lambda: now_s)
    kept = Garbage()

    async def rounds(number: int) -> list[int]:
        done.clear()
        for _ in range(number):
            kept.request_ended()
            await asyncio.sleep(0)
        return [done.count(generation) for generation in range(3)]

    a_full_one = (AGES + 1) * (AGES + 1)
    assert await rounds(a_full_one) == [AGES * (AGES + 1), AGES, 1]
    assert done[-1] == 2, "only after many of the others"
    assert (await rounds(3 * a_full_one))[2] == 0, "it has had its share"
    now_s += 1 / FULL_SHARE
    assert (await rounds(a_full_one))[2] == 1
