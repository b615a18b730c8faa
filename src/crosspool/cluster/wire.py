"""Messages as bytes: steps and their results as flat values, everything else as pickles.

A decode step crosses thousands of times a second and holds nothing but numbers and names, so it goes as plain tuples
(`marshal`), which costs a tenth of a pickle. What holds other objects (a joining sequence, log-probabilities) is
pickled.
"""

import marshal
import pickle
from collections.abc import Iterable
from typing import Any

from crosspool.cluster.messages import Step, StepFinished, StepTold
from crosspool.core import SampledToken
from crosspool.scheduler.step import StepDescriptor, StepHeader, StepResult, StepRow

Plain = tuple[Any, ...]

_PICKLED, _FLAT_HEADER, _FLAT_STEP, _FLAT_RESULT, _FLAT_TOLD = range(5)
"""First byte of a message: how the rest is to be read."""


def dumps(message: tuple[str, object]) -> bytes:
    """The name of a rank and a message to or from it, as bytes for `loads`."""
    try:
        flat = _flat(*message)
        if flat is not None:
            return bytes((flat[0],)) + marshal.dumps(flat[1])
    except ValueError:  # a field holds an object that is not plain data
        pass
    return bytes((_PICKLED,)) + pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def loads(data: bytes | memoryview) -> Any:
    """The rank and the message. Only for bytes that this program's own processes wrote."""
    kind, rest = data[0], data[1:]
    if kind == _PICKLED:
        return pickle.loads(rest)
    rank, other, header, rows = marshal.loads(rest)
    if kind == _FLAT_HEADER:
        return rank, Step(StepHeader(*header), other)
    if kind == _FLAT_STEP:
        return rank, Step(StepDescriptor(header=StepHeader(*header), rows=tuple(map(StepRow._make, rows))), other)
    if kind == _FLAT_TOLD:
        lane, step_seq = header
        return rank, StepTold(lane, step_seq, tuple(map(_tokens, rows)))
    lane, step_seq, *times = header
    return rank, StepFinished(StepResult(lane, step_seq, _tokens(rows), *times), tuple(map(_tokens, other)))


def _flat(rank: str, message: object) -> tuple[int, Plain] | None:
    """What kind of message it is and its plain values; None for one that is pickled."""
    if isinstance(message, Step):
        work = message.work
        if isinstance(work, StepHeader):
            return _FLAT_HEADER, (rank, message.behind, tuple(work), ())
        if not work.joining:
            return _FLAT_STEP, (rank, message.behind, tuple(work.header), _plain(work.rows))
    elif isinstance(message, StepFinished):
        lane, step_seq, sampled, *times = message.result
        return _FLAT_RESULT, (rank, tuple(map(_plain, message.told)), (lane, step_seq, *times), _plain(sampled))
    elif isinstance(message, StepTold):
        return _FLAT_TOLD, (rank, 0, (message.lane, message.step_seq), tuple(map(_plain, message.steps)))
    return None


def _plain(rows: Iterable[Plain]) -> tuple[Plain, ...]:
    """Rows or tokens as tuples of no other name, the only ones that `marshal` takes."""
    return tuple(map(tuple, rows))


def _tokens(rows: Iterable[Plain]) -> tuple[SampledToken, ...]:
    return tuple(map(SampledToken._make, rows))
