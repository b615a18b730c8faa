"""One lane's decode steps of a split model: their time by every way, each side's part of it, and the host's."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.report import Report
from benchmarks.split_model.lanes_at_work import NO_WAITS, busy_times
from benchmarks.split_model.model import Gpus, drawn_cache, step_times_ms
from benchmarks.split_model.parts import COPY_TB_PER_S, Floor, compare, share_of_slowest, step_floor
from benchmarks.split_model.ways import WAYS, Drawn, split_model
from crosspool.backends.cuda.kv_frames.cache import PagedCache

ROUND_MS = 45.0
"""About what one round of steps may take."""

LEAST_STEPS, MOST_STEPS = 5, 24
NOTE = f"bytes at {COPY_TB_PER_S} TB/s, experts as random routing chooses them, one pool after the other"


def round_steps(floor: Floor) -> int:
    """Steps of a round: fewer where they are long. A step takes some 1.5 times its floor."""
    return max(LEAST_STEPS, min(MOST_STEPS, int(ROUND_MS / (1.5 * floor.step))))


class Steps:
    """ways: what every case is measured by."""

    def __init__(self, gpus: Gpus, report: Report, ways: Sequence[str], seed: int) -> None:
        self.gpus, self.report, self.ways, self.seed = gpus, report, ways, seed

    def measure(
        self,
        drawn: Drawn,
        layout: str,
        batch: int,
        context: int,
        *,
        ways: Sequence[str] = (),
        has_parts: bool = True,
        target: float | None = None,
    ) -> None:
        """Steps by every way. ways: in place of the usual ones. has_parts: each side's busy time too, by usual ways."""
        case = f"{drawn.name}.{layout}.b{batch}.{context // 1024}k"
        floor = step_floor(drawn.spec, batch, context, share_of_slowest(layout))
        chosen = list(ways or self.ways)
        if any(gpu == 0 for gpu, _ in drawn.slices):  # attention needs its GPU's multiprocessors
            chosen = [way for way in chosen if WAYS[way].shares_a_gpu]
        cache = drawn_cache(drawn.spec, batch, context, self.seed, self.gpus.devices[0])
        medians = {}
        for way in chosen:
            model = split_model(self.gpus, drawn, way, batch=batch, context=context, seed=self.seed, cache=cache)
            times = step_times_ms(model, context, steps=round_steps(floor), rounds=2)
            medians[way] = sorted(times)[len(times) // 2]
            self.report.samples(f"decode_ms.{case}.{way}", times, limit=floor.step, note=NOTE)
            if way == chosen[0]:
                self.report.metric(f"decode_ms.{case}.graph_mib", model.graph.num_bytes / 2**20)
                self.report.metric(f"decode_ms.{case}.capture_ms", model.graph.seconds * 1e3)
            model.stop()
            del model
        shown = ", ".join(f"{way} {value:.3f}" for way, value in medians.items())
        asked = "" if target is None else f", asked {target}"
        print(f"decode_ms.{case}: {shown}; floor {floor.step:.3f}{asked}", flush=True)
        for way, median in medians.items():
            if not has_parts or way not in self.ways:
                continue
            self._parts(drawn, f"{case}.{way}", way, batch, context, floor, median, cache)

    def _parts(
        self,
        drawn: Drawn,
        name: str,
        way: str,
        batch: int,
        context: int,
        floor: Floor,
        median_ms: float,
        cache: PagedCache,
    ) -> None:
        """Microseconds a layer of each side, beside its bytes, and what crossings and the rest take."""
        model = split_model(
            self.gpus, drawn, way, batch=batch, context=context, seed=self.seed, rule=NO_WAITS, cache=cache
        )
        busy = busy_times(model)
        model.stop()
        us, metric = 1e3 / drawn.spec.num_layers, f"decode_us_a_layer.{name}"
        rest = median_ms - busy.attention - max(busy.ffn, busy.beside)
        self.report.metric(f"{metric}.attention", busy.attention * us, limit=floor.attention * us, note="bytes")
        self.report.metric(f"{metric}.tail", busy.tail * us, note="head and sampling, part of attention")
        self.report.metric(f"{metric}.ffn", busy.ffn * us, limit=floor.ffn * us, note="bytes")
        if busy.beside:
            self.report.metric(f"{metric}.beside", busy.beside * us, note="the FFN's share on attention's GPU")
        self.report.metric(f"{metric}.rest", rest * us, limit=2 * 2.06, note="two bare flags")
        print(
            f"  {way}, us a layer: attention {busy.attention * us:.1f} (bytes {floor.attention * us:.1f}; tail "
            f"{busy.tail * us:.1f} of it), ffn {busy.ffn * us:.1f} ({floor.ffn * us:.1f}), beside attention "
            f"{busy.beside * us:.1f}, rest {rest * us:.1f}",
            flush=True,
        )

    def equality(self, drawn: Drawn, layout: str, batch: int) -> None:
        """Split logits against those of one GPU, by every way."""
        for way in self.ways:
            model = split_model(self.gpus, drawn, way, batch=batch, context=512, seed=self.seed)
            equal = compare(self.gpus, model, drawn.slices, 512)
            model.stop()
            del model
            self.report.metric(f"equal_steps.{drawn.name}.{layout}.b{batch}.{way}", equal, limit=3, note="bit for bit")
            print(f"equal_steps.{drawn.name}.{layout}.b{batch}.{way}: {equal} of 3", flush=True)

    def host_us(self, drawn: Drawn, layout: str) -> None:
        """What the host does for one step of all ranks, by processor time: records, replays and the token's read."""
        model = split_model(self.gpus, drawn, "graphs", batch=1, context=1024, seed=self.seed)
        num_ranks, used_us, clock_us = 1 + len(drawn.slices), [], []
        for step in range(110):
            model.rewind(1024)
            begin_s, begin_used_s = time.perf_counter(), time.thread_time()
            slot = model.enqueue([step])
            enqueued_s, enqueued_used_s = time.perf_counter(), time.thread_time()
            model.synchronize()
            read_s, read_used_s = time.perf_counter(), time.thread_time()
            model.kv.lane.tokens(slot, 1)
            used_s = enqueued_used_s - begin_used_s + time.thread_time() - read_used_s
            used_us.append(1e6 * used_s / num_ranks)
            clock_us.append(1e6 * (enqueued_s - begin_s + time.perf_counter() - read_s) / num_ranks)
        name = f"{drawn.name}.{layout}"
        self.report.samples(f"host_us_per_step.{name}", used_us[10:], limit=60, note="of a core, a rank's share; asked")
        self.report.samples(f"host_clock_us_per_step.{name}", clock_us[10:], limit=60, note="the same on the clock")
        print(f"host_us_per_step.{name}: {sorted(used_us[10:])[50]:.1f}", flush=True)
