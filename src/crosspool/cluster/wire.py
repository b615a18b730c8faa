"""Messages as bytes: pickles in which the dataclasses of a step are taken apart and put together the short way.

A step of many rows crosses as many small frozen objects. What `dataclasses` gives pickle for those with slots looks up
their fields for each object; here the fields of a class are looked up once.
"""

import copyreg
import io
import pickle
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from crosspool.core import SampledToken
from crosspool.scheduler.step import NewSequence, StepDescriptor, StepHeader, StepResult, StepRow

_CLASSES: tuple[type[Any], ...] = (StepDescriptor, StepHeader, StepRow, NewSequence, StepResult, SampledToken)
_set = object.__setattr__


def dumps(message: object) -> bytes:
    """The message as bytes for `loads`."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _dispatch_table
    pickler.dump(message)
    return buffer.getvalue()


def loads(data: bytes | memoryview) -> Any:
    """The message. Only for bytes that this program's own processes wrote."""
    return pickle.loads(data)


def _build(cls: type[Any], *values: object) -> object:
    """An instance as it was: its fields were checked when it was first made."""
    new = object.__new__(cls)
    for name, value in zip(cls.__slots__, values, strict=True):
        _set(new, name, value)
    return new


def _reducer(cls: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    values_of = attrgetter(*cls.__slots__)
    return lambda message: (_build, (cls, *values_of(message)))


_dispatch_table = copyreg.dispatch_table | {cls: _reducer(cls) for cls in _CLASSES}
