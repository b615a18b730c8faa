"""RankHalves: makes a rank's half of a step, by what the rank is in it: leader, share, weights rank or prefill rank."""

from collections.abc import Callable
from dataclasses import dataclass

from crosspool.backends.base import HalfStep
from crosspool.cluster.lane_run import LaneRun, Outcome
from crosspool.cluster.rank_links import RankLinks
from crosspool.cluster.rank_models import RankModels
from crosspool.cluster.worker import RankWorker
from crosspool.scheduler.step import StepDescriptor, StepHeader

Work = StepDescriptor | StepHeader


@dataclass(frozen=True, slots=True)
class RankHalves:
    """Halves of one rank. `clock` is that of its loop, in seconds."""

    name: str
    worker: RankWorker
    models: RankModels
    links: RankLinks
    clock: Callable[[], float]
    step_deadline_s: float

    def leads(self, header: StepHeader) -> bool:
        """Whether this rank's word ends the step."""
        return self.worker.is_kv and header.kv_rank == self.name

    def may_begin_ahead(self, work: Work) -> bool:
        """Whether the half's first segment may run while the lane's step before it does."""
        ahead = self.worker.ahead
        return ahead is not None and ahead.may_begin_ahead(work)

    def make(self, work: Work) -> LaneRun | None:
        """The half, not begun; None where nobody waits for this rank. Raises what the worker does."""
        header = header_of(work)
        leads = self.leads(header)
        half: HalfStep[Outcome]
        if not isinstance(work, StepDescriptor):
            links = self.links.of(header, (header.kv_rank,))
            half = self.worker.ffn.run(work, links)
        elif self.worker.prefill_worker is not None:
            links = self.links.of(header, (header.kv_rank,))
            half = self.worker.prefill_worker.run(work, links)
        elif leads:
            links = self.links.of(header, *self._peers(header))
            half = self.worker.attention.run(work, links)
        else:
            links = self.links.of(header, (), (header.kv_rank,))
            share = self.worker.share.run_share(work, links)
            if share is None:
                return None
            half = share
        deadline_s = self.step_deadline_s * (1 if leads else 2)  # the leading rank speaks before the others
        run = LaneRun(header, half, links, self.clock(), deadline_s, leads=leads)
        run.clocks = self.links.clocks(header.lane, links)
        return run

    def _peers(self, header: StepHeader) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Those whose rows the leading rank waits for in every layer, and those of its exchange."""
        placement = self.models.placement(header.model)
        if placement is None:
            return (), ()
        if header.prefill_rank is not None:
            return (header.prefill_rank,), ()
        return placement.weights_ranks, placement.shares(self.name)


def header_of(work: Work) -> StepHeader:
    return work.header if isinstance(work, StepDescriptor) else work
