"""Prepares one lane for a model that a weights rank has just loaded: its passes, whatever will run them."""

from collections.abc import Callable
from itertools import product

from crosspool.backends.cuda.steps.passes import BUCKETS
from crosspool.backends.cuda.weights_rank.ffn_passes import FFNPasses, FFNPassKind, FFNWay
from crosspool.backends.cuda.weights_rank.resident_ffn import ResidentFFN


def prepare_passes(
    found: FFNPasses,
    resident: ResidentFFN | None,
    way: FFNWay,
    tell: Callable[[], None],
    *,
    may_fuse: bool,
    may_run: bool,
) -> None:
    """Capture the model's passes on this way, and give those of a resident server their layers.

    may_fuse: also passes whose layers are one kernel. may_run: also the loops of runs. tell: raises where the load was
    given up. Channels that are closed meanwhile are left to first steps.
    """
    for bucket, is_fused in product(BUCKETS, (False, True) if may_fuse else (False,)):
        if not way.lane.holds(way.links):
            return
        kind = FFNPassKind(bucket, is_fused)
        found.find(way, kind)
        if may_run and kind.is_run:
            way.lane.prepare_loop(way.model_name, way.links, kind)
        tell()
    if resident is not None:
        resident.prepare(way, BUCKETS)
