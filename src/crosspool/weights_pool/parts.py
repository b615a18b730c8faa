"""The parts of a share, with what thousands of like tensors have in common worked out once.

A layer of 128 experts is 384 matrices that differ in where they begin and in which expert they are. Working each of
them out anew kept one thread busy for two thirds of the time in which a GPU's bus moves it.
"""

from collections.abc import Callable, Iterator
from math import prod

from crosspool.weights_pool.checkpoint import Checkpoint
from crosspool.weights_pool.extents import Part, part_of
from crosspool.weights_pool.loader import Destination, LoadPlan, reads_of, sources_of

EXPERT_REGIONS = ("expert_gate", "expert_up", "expert_down")
"""Of sources that are one expert's matrix: their places in a destination differ by whole experts."""


def parts(
    checkpoint: Checkpoint, plan: LoadPlan, max_elements: int, is_plain: Callable[[Part], bool]
) -> Iterator[Part]:
    """`part_of` every read of a plan, in execution order.

    is_plain: whether bytes are held as they are stored. The `read` of a plain part that goes to its destination in one
    run may be that of another expert, alike in everything but its place.
    """
    for destination in plan.destinations:
        yield from _parts_of(checkpoint, plan, destination, max_elements, is_plain)


def _parts_of(
    checkpoint: Checkpoint,
    plan: LoadPlan,
    destination: Destination,
    max_elements: int,
    is_plain: Callable[[Part], bool],
) -> Iterator[Part]:
    """One destination's. Of like experts the first is worked out, and the others follow from it."""
    expert_elements = prod(destination.shape[1:])
    firsts: dict[tuple[str, tuple[int, ...], str], tuple[Part, int, int]] = {}
    for source in sources_of(plan, destination):
        stored = checkpoint.tensors[source.name]
        kind = (source.region, source.shape, stored.dtype)
        if known := firsts.get(kind):
            first, begin, expert = known
            start, stop = first.start + stored.begin - begin, first.stop + stored.begin - begin
            assert first.at is not None
            at = first.at + (source.expert - expert) * expert_elements
            yield Part(stored.file, first.read, first.dtype, start, stop, first.shape, first.strides, at)
            continue
        found = [part_of(checkpoint, read) for read in reads_of(checkpoint, plan, destination, source, max_elements)]
        yield from found
        if len(found) == 1 and source.region in EXPERT_REGIONS and found[0].at is not None and is_plain(found[0]):
            firsts[kind] = (found[0], stored.begin, source.expert)
