"""Small groups with chosen stage times, for simulator tests."""

from __future__ import annotations

from collections.abc import Sequence

from crosspool.planner.roofline import StageTimes
from crosspool.scheduler.step import StepDescriptor
from crosspool.simulator.cost import StepWork
from crosspool.simulator.driver import CoreDriver, SimulatedRequest
from crosspool.simulator.group import SimulatedGroup, SimulatedModel
from crosspool.simulator.pipeline import Route
from tests.support.core_drive import a_config, a_model


def stages(attention=20.0, ffn=25.0, crossing=3.0, tail=0.0, layers=48, beside=0.0) -> StageTimes:
    """Stage times from microseconds."""
    return StageTimes(
        num_layers=layers,
        attention_s=attention * 1e-6,
        ffn_s=ffn * 1e-6,
        crossing_s=crossing * 1e-6,
        tail_s=tail * 1e-6,
        beside_s=beside * 1e-6,
    )


class LinearCost:
    """Stage times that grow with rows and cached tokens; the tail runs where something is sampled."""

    def __init__(
        self, attention=20.0, ffn=25.0, crossing=3.0, tail=50.0, layers=12, row=0.2, token=0.001, delay=1.0
    ) -> None:
        self.delay = delay
        self.base = stages(attention, ffn, crossing, tail, layers)
        self.row_s, self.token_s = row * 1e-6, token * 1e-6

    def times(self, work: StepWork) -> StageTimes:
        return StageTimes(
            num_layers=self.base.num_layers,
            attention_s=self.base.attention_s + work.kv_tokens * self.token_s,
            ffn_s=self.base.ffn_s + work.num_tokens * self.row_s,
            crossing_s=self.base.crossing_s,
            tail_s=self.base.tail_s if work.num_sampled else 1e-9,
        )

    def beside_others(self, work: StepWork) -> float:
        return self.delay


def a_group(costs: dict[str, LinearCost], num_frames=4096, order="priority", **config) -> SimulatedGroup:
    """One group with two stations; pages of 16 tokens."""
    models = [
        SimulatedModel(
            served=a_model(name, page_tokens=16, max_context=1 << 20), cost=cost, route=Route(kv=0, weights=1)
        )
        for name, cost in costs.items()
    ]
    settings = {"max_num_batched_tokens": 64, "max_queue": 1000, "prefix_caching": False, **config}
    return SimulatedGroup(
        name="g0", layout="crosspool", models=tuple(models), config=a_config(num_frames, **settings), order=order
    )


def requests(rows: Sequence[tuple[float, str, int, int]]) -> list[SimulatedRequest]:
    """From (arrival, model, prompt, output); clients ask for what they get."""
    return [SimulatedRequest(arrival, model, prompt, output, output) for arrival, model, prompt, output in rows]


def prefill_step(prompts: Sequence[int], max_tokens: int) -> StepDescriptor:
    """The first prefill step that an engine makes of these prompts."""
    group = a_group({"a": LinearCost()}, max_num_batched_tokens=max_tokens)
    driver = CoreDriver(group)
    for request in requests([(0.0, "a", prompt, 5) for prompt in prompts]):
        assert driver.accept(request, 0.0)
    (step,) = driver.schedule(0.0)
    return step
