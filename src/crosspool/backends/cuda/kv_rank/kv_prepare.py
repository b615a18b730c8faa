"""Prepares a model that a KV rank has just loaded: what chunks need, and its passes.

A capture may wait for the device. Where a KV rank and a weights rank have one process and GPU, the one may be capturing
its pass of a step while the other's, which waits for it, holds the device: both then stand still until a deadline.
"""

from collections.abc import Callable, Sequence

from crosspool.backends.cuda.channels.link import Site
from crosspool.backends.cuda.chunks.chunk_support import has_chunk_kernels
from crosspool.backends.cuda.chunks.chunk_warm_up import capture_spans, warm_up_attention
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.joined import JoinedFFN, await_ffn
from crosspool.backends.cuda.kv_rank.kv_models import KVModel
from crosspool.backends.cuda.kv_rank.kv_passes import KVPasses, KVPassKind, KVWay
from crosspool.backends.cuda.steps.lanes import WorkerLanes
from crosspool.backends.cuda.steps.passes import BUCKETS


def prepare_chunks(kernels: Launcher, site: Site, lanes: WorkerLanes, model: KVModel) -> None:
    """Load what chunks need, where the model's prompts run in chunks."""
    if not has_chunk_kernels(model.spec) or model.split != "one":
        return
    streams = lanes.prefill_streams().by_share.values()
    warm_up_attention(kernels, model.spec, model.weights, model.frames, model.geometry, streams)
    model.spans = capture_spans(model.spec, site.device, lanes.capture_streams.by_share)


def kinds_ahead(site: Site, weights_ranks: Sequence[str]) -> tuple[KVPassKind, ...]:
    """Passes to capture: those of decode, the largest first, whose scratch the others share.

    Beside a weights rank, which may be waiting on this GPU for the pass that is captured, those of short prompts too.
    """
    found = [KVPassKind(bucket, samples=True, is_decode=True) for bucket in reversed(BUCKETS)]
    if any(site.devices[rank] == site.index for rank in weights_ranks):
        found += [
            KVPassKind(bucket, samples, is_decode=False) for bucket in reversed(BUCKETS) for samples in (True, False)
        ]
    return tuple(found)


def prepare_passes(
    found: KVPasses,
    site: Site,
    lanes: WorkerLanes,
    name: str,
    model: KVModel,
    weights_ranks: Sequence[str],
    joined: JoinedFFN | None,
    tell: Callable[[], None],
    run_lanes: int = 0,
) -> None:
    """Capture the model's passes for every lane that is open, in the first `run_lanes` also in their loops.

    tell: raises where the load was given up. Channels that are closed meanwhile are left to first steps.
    """
    if model.split != "one":
        return  # passes are captured for the shares that take part in them
    if joined is not None:
        await_ffn(joined, name, tell)
    for number, lane, links in lanes.open_to(weights_ranks):
        way = KVWay(name, model, number, lane, links, joined=joined)
        for kind in kinds_ahead(site, () if joined is not None else weights_ranks):
            if not lane.holds(links):
                break
            found.find(way, kind)
            if kind.is_run and number < run_lanes:
                lane.prepare_loop(name, links, kind)
            tell()
