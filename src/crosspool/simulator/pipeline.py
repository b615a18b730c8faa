"""The layer-exact pipeline: lanes go round between stations, put by put and wait by wait, on a virtual clock.

A station is a set of GPUs that work in lockstep on one segment at a time: the KV ranks of a model, or its weights
ranks. A step is attention, crossing, FFN, crossing for every layer, then the tail. A share of the FFN may lie beside
attention: it is a segment of the KV station, and the layer goes on once both parts have arrived. Which of the segments
that wait at a station runs next is asked of the same order policies as the workers use (`scheduler/order.py`).
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from crosspool.cluster.lane_run import STARVING_PRIORITY
from crosspool.planner.roofline import StageTimes
from crosspool.scheduler.order import OrderPolicy, Segment

ARRIVES_AT_WEIGHTS, FFN_ENDS, ARRIVES_AT_KV, ATTENTION_ENDS, ARRIVES_BESIDE, BESIDE_ENDS = range(6)
"""What happens, in the low bits of a code; the lane is above them."""
BITS, KIND = 3, 7


@dataclass(frozen=True, slots=True)
class Span:
    """One segment that a station ran."""

    station: int
    lane: int
    start_s: float
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The stations a model's steps go between, and how urgent they are (smaller first).

    patience_s: a segment that waited longer outranks every priority, as in the workers.
    """

    kv: int
    weights: int
    priority: int = 0
    patience_s: float = float("inf")


class Pipeline(Protocol):
    """Lanes that run steps between stations."""

    now_s: float
    num_events: int
    busy_s: list[float]  # by station

    def start(self, lane: int, times: StageTimes, route: Route, now_s: float, done: float = 0.0) -> None:
        """Give an idle lane a step whose first segment is ready at `now_s`; a share of its layers may be done."""
        ...

    def advance(self, until_s: float) -> int | None: ...

    def progress(self, lane: int) -> float: ...


class OrderedPipeline:
    """Stations that run one segment at a time, in the order of `policy`.

    An event is a segment's end or the arrival of rows; `num_events` counts them. spans: filled with every segment where
    a list is given.
    """

    def __init__(
        self,
        num_stations: int,
        num_lanes: int,
        policy: OrderPolicy,
        *,
        spans: list[Span] | None = None,
    ) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self.busy_s = [0.0] * num_stations
        self.spans = spans
        self._policy = policy
        self._patience_s = [float("inf")] * num_lanes
        self._heap: list[tuple[float, int]] = []
        self._is_busy = [False] * num_stations
        self._waiting: list[list[int]] = [[] for _ in range(num_stations)]  # codes, in order of readiness
        self._attention_s, self._ffn_s, self._crossing_s, self._tail_s = ([0.0] * num_lanes for _ in range(4))
        self._beside_s = [0.0] * num_lanes
        self._is_half_done = [False] * num_lanes  # one of the FFN's two parts has ended
        self._kv, self._weights, self._priority, self._left, self._layers = ([0] * num_lanes for _ in range(5))
        self._ready_s = [0.0] * (num_lanes << BITS)  # by code

    def start(self, lane: int, times: StageTimes, route: Route, now_s: float, done: float = 0.0) -> None:
        assert self._left[lane] == 0, f"lane {lane} already runs a step"
        self._attention_s[lane], self._ffn_s[lane] = times.attention_s, times.ffn_s
        self._crossing_s[lane], self._tail_s[lane] = times.crossing_s, times.tail_s
        self._beside_s[lane] = times.beside_s
        self._kv[lane], self._weights[lane], self._priority[lane] = route.kv, route.weights, route.priority
        self._patience_s[lane] = route.patience_s
        self._layers[lane] = times.num_layers + 1  # segments at the KV station
        self._left[lane] = _segments_left(times, done)
        heappush(self._heap, (now_s, lane << BITS | ARRIVES_AT_KV))

    def progress(self, lane: int) -> float:
        """Share of the lane's step that has been run, by segments at the KV station."""
        return 1.0 - self._left[lane] / self._layers[lane] if self._layers[lane] else 0.0

    def advance(self, until_s: float) -> int | None:
        """Run to the next end of a step and return its lane, with `now_s` that moment; None at `until_s`."""
        heap, left = self._heap, self._left
        crossing, ffn, attention, tail = self._crossing_s, self._ffn_s, self._attention_s, self._tail_s
        beside, is_half_done = self._beside_s, self._is_half_done
        kv, weights, is_busy, waiting, busy_s = self._kv, self._weights, self._is_busy, self._waiting, self.busy_s
        ready_s, spans = self._ready_s, self.spans
        count = 0
        ended = None
        while heap:
            now = heap[0][0]
            if now > until_s:
                break
            code = heappop(heap)[1]
            count += 1
            kind, lane = code & KIND, code >> BITS
            if kind == ARRIVES_AT_WEIGHTS:
                station, duration, code = weights[lane], ffn[lane], code + 1
            elif kind == ARRIVES_AT_KV:
                station, code = kv[lane], code + 1
                duration = attention[lane] if left[lane] > 1 else tail[lane]
            elif kind == ARRIVES_BESIDE:
                station, duration, code = kv[lane], beside[lane], code + 1
            else:
                if kind == ATTENTION_ENDS:
                    station = kv[lane]
                    left[lane] -= 1
                    if left[lane]:
                        heappush(heap, (now + crossing[lane], code - 3))
                        if beside[lane]:
                            heappush(heap, (now + crossing[lane], code + 1))
                    else:
                        ended = lane
                else:
                    station = weights[lane] if kind == FFN_ENDS else kv[lane]
                    if beside[lane] and not is_half_done[lane]:
                        is_half_done[lane] = True
                    else:
                        is_half_done[lane] = False
                        heappush(heap, (now + crossing[lane], lane << BITS | ARRIVES_AT_KV))
                queue = waiting[station]
                if queue:
                    code = queue.pop(0) if len(queue) == 1 else self._pick(queue, now)
                    kind, lane = code & KIND, code >> BITS
                    if kind == ATTENTION_ENDS:
                        duration = attention[lane] if left[lane] > 1 else tail[lane]
                    else:
                        duration = ffn[lane] if kind == FFN_ENDS else beside[lane]
                    busy_s[station] += duration
                    heappush(heap, (now + duration, code))
                    if spans is not None:
                        spans.append(Span(station, lane, now, duration))
                else:
                    is_busy[station] = False
                if ended is not None:
                    self.now_s = now
                    self.num_events += count
                    return ended
                continue
            if is_busy[station]:
                waiting[station].append(code)
                ready_s[code] = now
            else:
                is_busy[station] = True
                busy_s[station] += duration
                heappush(heap, (now + duration, code))
                if spans is not None:
                    spans.append(Span(station, lane, now, duration))
        self.num_events += count
        self.now_s = max(self.now_s, until_s)
        return None

    def _pick(self, queue: list[int], now: float) -> int:
        """Take the segment that the policy names out of a queue in order of readiness."""
        segments = [
            Segment(
                code >> BITS,
                STARVING_PRIORITY
                if now - self._ready_s[code] > self._patience_s[code >> BITS]
                else self._priority[code >> BITS],
                ticket,
            )
            for ticket, code in enumerate(queue)
        ]
        return queue.pop(self._policy(segments).ticket)


class StreamPipeline:
    """Stations without any order: all segments there run at once at equal parts of the speed, as plain streams do.

    Equal lanes that start together stay together (they phase-lock): both want the same station all the time.
    """

    def __init__(self, num_stations: int, num_lanes: int) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self.busy_s = [0.0] * num_stations
        self._heap: list[tuple[float, int]] = []  # arrivals of rows
        self._running: list[dict[int, float]] = [{} for _ in range(num_stations)]  # code -> seconds of work left
        self._times: list[StageTimes | None] = [None] * num_lanes
        self._routes = [Route(kv=0, weights=0)] * num_lanes
        self._left = [0] * num_lanes
        self._is_half_done = [False] * num_lanes

    def start(self, lane: int, times: StageTimes, route: Route, now_s: float, done: float = 0.0) -> None:
        assert self._left[lane] == 0, f"lane {lane} already runs a step"
        self._times[lane], self._routes[lane], self._left[lane] = times, route, _segments_left(times, done)
        heappush(self._heap, (now_s, lane << BITS | ARRIVES_AT_KV))

    def progress(self, lane: int) -> float:
        times = self._times[lane]
        return 0.0 if times is None else 1.0 - self._left[lane] / (times.num_layers + 1)

    def advance(self, until_s: float) -> int | None:
        while True:
            arrival = self._heap[0][0] if self._heap else float("inf")
            first, end = self._first_end()
            now = min(arrival, end)
            if now > until_s or now == float("inf"):
                self._run_to(until_s if until_s < float("inf") else self.now_s)
                return None
            self._run_to(now)
            self.num_events += 1
            if end <= arrival:
                assert first is not None
                ended = self._end(*first)
                if ended is not None:
                    return ended
            else:
                self._arrive(heappop(self._heap)[1])

    def _first_end(self) -> tuple[tuple[int, int] | None, float]:
        """(station, code) of the segment that ends first, and when."""
        first, end = None, float("inf")
        for station, running in enumerate(self._running):
            if running:
                code = min(running, key=running.__getitem__)
                moment = self.now_s + running[code] * len(running)
                if moment < end:
                    first, end = (station, code), moment
        return first, end

    def _run_to(self, now: float) -> None:
        elapsed = now - self.now_s
        if elapsed <= 0:
            return
        for station, running in enumerate(self._running):
            if running:
                self.busy_s[station] += elapsed
                part = elapsed / len(running)
                for code in running:
                    running[code] -= part
        self.now_s = now

    def _arrive(self, code: int) -> None:
        lane, kind = code >> BITS, code & KIND
        times, route = self._times[lane], self._routes[lane]
        assert times is not None
        if kind == ARRIVES_AT_WEIGHTS:
            self._running[route.weights][code + 1] = times.ffn_s
        elif kind == ARRIVES_BESIDE:
            self._running[route.kv][code + 1] = times.beside_s
        else:
            self._running[route.kv][code + 1] = times.attention_s if self._left[lane] > 1 else times.tail_s

    def _end(self, station: int, code: int) -> int | None:
        del self._running[station][code]
        lane = code >> BITS
        times = self._times[lane]
        assert times is not None
        arrival_s = self.now_s + times.crossing_s
        if code & KIND != ATTENTION_ENDS:
            self._is_half_done[lane] = times.beside_s > 0 and not self._is_half_done[lane]
            if not self._is_half_done[lane]:
                heappush(self._heap, (arrival_s, lane << BITS | ARRIVES_AT_KV))
            return None
        self._left[lane] -= 1
        if self._left[lane] == 0:
            return lane
        heappush(self._heap, (arrival_s, code - 3))
        if times.beside_s:
            heappush(self._heap, (arrival_s, code + 1))
        return None


def _segments_left(times: StageTimes, done: float) -> int:
    """Segments at the KV station that a step has before it when a share of it is done; at least the tail."""
    return max(1, round((1.0 - done) * (times.num_layers + 1)))
