"""Trace: requests of several models in columns, sorted by arrival."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatColumn = npt.NDArray[np.float64]
IntColumn = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trace:
    """`num_requests` rows, sorted by arrival; all columns have that length.

    arrival_s: seconds from the start of the trace. service_s: seconds the request held its KV, NaN where not recorded.
    model: index into `models`. duration_s: how long was recorded; at least the last arrival.
    """

    arrival_s: FloatColumn
    model: IntColumn
    prompt_tokens: IntColumn
    output_tokens: IntColumn
    service_s: FloatColumn
    models: tuple[str, ...]
    duration_s: float

    @property
    def num_requests(self) -> int:
        return len(self.arrival_s)

    @property
    def has_service_times(self) -> bool:
        return self.num_requests > 0 and not bool(np.isnan(self.service_s).any())

    def rows(self) -> Iterator[tuple[float, str, int, int]]:
        """(arrival_s, model, prompt_tokens, output_tokens) in order of arrival."""
        columns = (self.arrival_s, self.model, self.prompt_tokens, self.output_tokens)
        for arrival, model, prompt, output in zip(*(column.tolist() for column in columns), strict=True):
            yield arrival, self.models[model], prompt, output

    def where(self, mask: npt.NDArray[np.bool_]) -> "Trace":
        """The rows of `mask`; models and duration stay."""
        return Trace(
            arrival_s=self.arrival_s[mask],
            model=self.model[mask],
            prompt_tokens=self.prompt_tokens[mask],
            output_tokens=self.output_tokens[mask],
            service_s=self.service_s[mask],
            models=self.models,
            duration_s=self.duration_s,
        )

    def of_model(self, name: str) -> "Trace":
        """The rows of one model. Raises ValueError naming the models there are."""
        if name not in self.models:
            raise ValueError(f"the trace has no model {name!r}; it has {', '.join(self.models)}")
        return self.where(self.model == self.models.index(name))

    def window(self, start_s: float, stop_s: float) -> "Trace":
        """Rows that arrive in [start_s, stop_s), on a clock that starts at `start_s`."""
        part = self.where((self.arrival_s >= start_s) & (self.arrival_s < stop_s))
        return make_trace(
            part.arrival_s - start_s,
            part.model,
            part.prompt_tokens,
            part.output_tokens,
            models=self.models,
            service_s=part.service_s,
            duration_s=min(stop_s, self.duration_s) - start_s,
        )

    def renamed(self, names: Mapping[str, str]) -> "Trace":
        """The same rows under other model names; several may become one. Names without an entry stay."""
        new = tuple(dict.fromkeys(names.get(name, name) for name in self.models))
        lookup = np.array([new.index(names.get(name, name)) for name in self.models], dtype=np.int64)
        return make_trace(
            self.arrival_s,
            lookup[self.model] if self.num_requests else self.model,
            self.prompt_tokens,
            self.output_tokens,
            models=new,
            service_s=self.service_s,
            duration_s=self.duration_s,
        )


def make_trace(
    arrival_s: npt.ArrayLike,
    model: npt.ArrayLike,
    prompt_tokens: npt.ArrayLike,
    output_tokens: npt.ArrayLike,
    *,
    models: Sequence[str],
    service_s: npt.ArrayLike | None = None,
    duration_s: float | None = None,
) -> Trace:
    """A trace of these columns, in any order. Arrivals count from 0; rows that arrive together keep their order.

    Raises ValueError, naming the row, for negative or non-finite times and for token counts below 0.
    """
    arrival = np.asarray(arrival_s, dtype=np.float64)
    service = np.full(len(arrival), np.nan) if service_s is None else np.asarray(service_s, dtype=np.float64)
    prompt, output = np.asarray(prompt_tokens, dtype=np.int64), np.asarray(output_tokens, dtype=np.int64)
    _refuse("arrival_s", arrival, ~(np.isfinite(arrival) & (arrival >= 0)))
    _refuse("service_s", service, np.isinf(service) | (service < 0))
    _refuse("prompt_tokens", prompt, prompt < 0)
    _refuse("output_tokens", output, output < 0)
    order = np.argsort(arrival, kind="stable")
    last = float(arrival[order[-1]]) if len(arrival) else 0.0
    if duration_s is not None and duration_s < last:
        raise ValueError(f"the trace lasts {duration_s} s, but a request arrives at {last} s; give a longer duration")
    return Trace(
        arrival_s=arrival[order],
        model=np.asarray(model, dtype=np.int64)[order],
        prompt_tokens=prompt[order],
        output_tokens=output[order],
        service_s=service[order],
        models=tuple(models),
        duration_s=last if duration_s is None else duration_s,
    )


def _refuse(name: str, column: npt.NDArray[np.generic], wrong: npt.NDArray[np.bool_]) -> None:
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(f"{name} of request {row + 1} is {column[row]}; it must be a number of 0 or more")
