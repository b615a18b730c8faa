"""Prepares a model that a KV rank has just loaded: what chunks need, and the passes that steps most often take."""

from collections.abc import Callable, Sequence

from crosspool.backends.cuda.chunk_support import is_supported
from crosspool.backends.cuda.chunk_warm_up import capture_spans, warm_up_attention
from crosspool.backends.cuda.joined import JoinedFFN, await_ffn
from crosspool.backends.cuda.kv_models import KVModel
from crosspool.backends.cuda.kv_passes import KVPasses, KVPassKind, KVWay
from crosspool.backends.cuda.lanes import WorkerLanes
from crosspool.backends.cuda.launch import Launcher
from crosspool.backends.cuda.link import Site
from crosspool.backends.cuda.prepare import COMMON_BUCKETS
from crosspool.backends.cuda.sm_partition import PrefillStreams


def prepare_chunks(kernels: Launcher, site: Site, lanes: WorkerLanes, model: KVModel) -> None:
    """Load what chunks need, where the model's prompts run in chunks."""
    if not is_supported(model.spec) or model.split != "one":
        return
    streams = lanes.prefill_streams().by_share.values()
    warm_up_attention(kernels, model.spec, model.weights, model.frames, model.geometry, streams)
    # Not on a lane's streams: what another thread enqueues there meanwhile would join the capture.
    own = PrefillStreams(site.driver, site.device, site.partition)
    model.spans = capture_spans(model.spec, site.device, own.by_share)


def prepare_passes(
    found: KVPasses,
    lanes: WorkerLanes,
    name: str,
    model: KVModel,
    weights_ranks: Sequence[str],
    joined: JoinedFFN | None,
    tell: Callable[[], None],
) -> None:
    """Capture the model's common passes for every lane that is open. tell: raises where the load was given up."""
    if model.split != "one":
        return  # passes are captured for the shares that take part in them
    if joined is not None:
        await_ffn(joined, name, tell)
    for number, lane, links in lanes.open_to(weights_ranks):
        way = KVWay(name, model, number, lane, links, joined=joined)
        for bucket in COMMON_BUCKETS:
            found.find(way, KVPassKind(bucket, True, True))
            tell()
