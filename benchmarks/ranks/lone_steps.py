"""Single steps of ranks that are driven in one thread: run one, and what its host takes of a core."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.ranks.driven import DrivenRanks, Sequence_


def finish_step(ranks: DrivenRanks) -> None:
    """Turn both ranks until the step that they are at has ended."""
    while not any(has_ended for _, _, has_ended in ranks.take()):
        ranks.turn()


def one_step(ranks: DrivenRanks, sequences: Sequence[Sequence_]) -> None:
    """A decode step, from its descriptor to its tokens."""
    ranks.submit(ranks.decode(0, sequences, 1))
    finish_step(ranks)


def warmed_up(ranks: DrivenRanks, context: int, num_steps: int, batch: int = 1) -> tuple[Sequence[Sequence_], float]:
    """A batch of sequences of `context` tokens that has taken some steps, and the seconds of the last one."""
    sequences = [ranks.sequence(context, slot) for slot in range(batch)]
    for sequence in sequences:
        ranks.submit(ranks.begin(0, sequence))
        finish_step(ranks)
    for _ in range(num_steps):
        begin_s = time.perf_counter()
        one_step(ranks, sequences)
    return sequences, time.perf_counter() - begin_s


def host_us(ranks: DrivenRanks, sequences: Sequence[Sequence_], pause_s: float, count: int) -> dict[str, list[float]]:
    """Microseconds of processor time of each rank for a step: taking and launching it, then reading what it left.

    pause_s: in which the devices end a step, and the host sleeps; 0: it looks for the end all the time, which is not
    counted.
    """
    found: dict[str, list[float]] = {"kv0": [], "w0": []}
    for _ in range(count):
        launching = ranks.submit_timed(ranks.decode(0, sequences, 1))
        if pause_s:
            time.sleep(pause_s)
        while not ranks.has_ended():
            pass
        reading = ranks.turn_timed()
        if not any(has_ended for _, _, has_ended in ranks.take()):
            finish_step(ranks)
            continue
        for rank, used_us in found.items():
            used_us.append(1e6 * (launching[rank] + reading[rank]))
    return found
