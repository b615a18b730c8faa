"""Messages as bytes: steps and their results as flat values, everything else as pickles.

A decode step crosses thousands of times a second and holds nothing but numbers and names, so it goes as tuples of the
fields of its dataclasses (`marshal`), which costs a tenth of a pickle. What holds other objects (a joining sequence,
log-probabilities) is pickled, with the dataclasses of a step taken apart and put together the short way: their fields
are looked up once for a class, not for each object.
"""

import copyreg
import io
import marshal
import pickle
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from crosspool.cluster.messages import Step, StepFinished, StepTold
from crosspool.core import SampledToken
from crosspool.scheduler.step import NewSequence, StepDescriptor, StepHeader, StepResult, StepRow

_CLASSES: tuple[type[Any], ...] = (StepDescriptor, StepHeader, StepRow, NewSequence, StepResult, SampledToken)
_set = object.__setattr__

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
    buffer = io.BytesIO()
    buffer.write(bytes((_PICKLED,)))
    pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _dispatch_table
    pickler.dump(message)
    return buffer.getvalue()


def loads(data: bytes | memoryview) -> Any:
    """The rank and the message. Only for bytes that this program's own processes wrote."""
    kind, rest = data[0], data[1:]
    if kind == _PICKLED:
        return pickle.loads(rest)
    rank, other, header, rows = marshal.loads(rest)
    if kind == _FLAT_HEADER:
        return rank, Step(_header(*header), other)
    if kind == _FLAT_STEP:
        step = StepDescriptor(header=_header(*header), rows=tuple([_row(*row) for row in rows]))
        return rank, Step(step, other)
    if kind == _FLAT_TOLD:
        lane, step_seq = header
        return rank, StepTold(lane, step_seq, tuple(map(_tokens, rows)))
    return rank, StepFinished(_result(_tokens(rows), *header), tuple(map(_tokens, other)))


def _flat(rank: str, message: object) -> tuple[int, tuple[Any, ...]] | None:
    """What kind of message it is and its plain values; None for one that is pickled."""
    if isinstance(message, Step):
        work = message.work
        if isinstance(work, StepHeader):
            return _FLAT_HEADER, (rank, message.behind, _header_values(work), ())
        if not work.joining:
            rows = tuple(map(_row_values, work.rows))
            return _FLAT_STEP, (rank, message.behind, _header_values(work.header), rows)
    elif isinstance(message, StepFinished):
        sampled, *header = _result_values(message.result)
        return _FLAT_RESULT, (rank, _told_values(message.told), header, tuple(map(_token_values, sampled)))
    elif isinstance(message, StepTold):
        return _FLAT_TOLD, (rank, 0, (message.lane, message.step_seq), _told_values(message.steps))
    return None


def _told_values(steps: tuple[tuple[SampledToken, ...], ...]) -> tuple[tuple[Any, ...], ...]:
    return tuple([tuple(map(_token_values, step)) for step in steps])


def _tokens(rows: Iterable[Iterable[Any]]) -> tuple[SampledToken, ...]:
    return tuple([SampledToken(*values) for values in rows])


def _build(cls: type[Any], *values: object) -> object:
    """An instance as it was: its fields were checked when it was first made."""
    new = object.__new__(cls)
    for name, value in zip(cls.__slots__, values, strict=True):
        _set(new, name, value)
    return new


def _maker(cls: type[Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """What makes an instance of the values of the fields `names`; they were checked when it was first made."""

    def make(*values: object) -> object:
        new = object.__new__(cls)
        for name, value in zip(names, values, strict=True):
            _set(new, name, value)
        return new

    return make


def _reducer(cls: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    values_of = attrgetter(*cls.__slots__)
    return lambda message: (_build, (cls, *values_of(message)))


_dispatch_table = copyreg.dispatch_table | {cls: _reducer(cls) for cls in _CLASSES}

_header_values, _row_values, _token_values = (attrgetter(*cls.__slots__) for cls in (StepHeader, StepRow, SampledToken))
_header, _row = _maker(StepHeader, StepHeader.__slots__), _maker(StepRow, StepRow.__slots__)
_RESULT_NAMES = ("sampled", *(name for name in StepResult.__slots__ if name != "sampled"))
_result_values, _result = attrgetter(*_RESULT_NAMES), _maker(StepResult, _RESULT_NAMES)
