"""Long contexts by layout, simulated: which share of requests of each length is served, and how fast it decodes.

    python -m benchmarks.simulated_contexts

The paper's three models on its five GPUs of 40 GB. Prompts are log-uniform within each bin, outputs 256 tokens; the
models' own context limits are lifted, as with stretched rotary frequencies, so that only memory refuses.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from crosspool.planner.deployment import PlanInput
from crosspool.planner.planner import plan_deployment
from crosspool.simulator.driver import SimulatedRequest
from crosspool.simulator.group import Layout, SimulatedGroup
from crosspool.simulator.layouts import simulated_group
from crosspool.simulator.measures import ModelMeasures
from crosspool.simulator.steps import simulate_steps
from crosspool.workload.lengths import LogUniform

EDGES = (1, 8, 16, 32, 64, 128, 256, 512)
"""Of the bins, in Ki tokens."""

LAYOUTS: tuple[Layout, ...] = ("crosspool", "static", "elastic")
MODELS = ("qwen3-30b-a3b", "glm-4.7-flash", "deepseek-v2-lite")
REQUESTS, INTERVAL_S, OUTPUT = 24, 2000.0, 256


def main() -> None:
    plan_input = PlanInput.model_validate(
        {"gpus": {"kind": "a100-40gb", "count": 5, "kv": 1}, "models": list(MODELS), "admission": "reserve"}
    )
    group = plan_deployment(plan_input).groups[0]
    layouts = [unlimited(simulated_group(group.models, group.split, plan_input, layout)) for layout in LAYOUTS]
    print("| model | tokens of context | " + " | ".join(LAYOUTS) + " |")
    print("| --- | --- |" + " ---: |" * len(LAYOUTS))
    for model in MODELS:
        for low, high in pairwise(EDGES):
            cells = [cell(served(layout, model, low * 1024, high * 1024)) for layout in layouts]
            print(f"| {model} | {low}-{high} Ki | " + " | ".join(cells) + " |", flush=True)


def unlimited(group: SimulatedGroup) -> SimulatedGroup:
    """The same group with models that take any context."""
    models = []
    for model in group.models:
        spec = replace(model.served.spec, max_position_embeddings=1 << 24)
        models.append(replace(model, served=replace(model.served, spec=spec)))
    return replace(group, models=tuple(models))


def served(group: SimulatedGroup, model: str, shortest: int, longest: int) -> ModelMeasures:
    """Requests of one model, each after the last one has ended, and a short one of each other model in between."""
    rng = np.random.default_rng([shortest, longest])
    prompts, outputs = LogUniform(shortest=shortest, longest=longest, output_tokens=OUTPUT).draw(rng, REQUESTS)
    requests = []
    for index, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True)):
        requests.append(SimulatedRequest(index * INTERVAL_S, model, prompt, output, output))
        for other in MODELS:
            if other != model:
                requests.append(SimulatedRequest((index + 0.5) * INTERVAL_S, other, 512, OUTPUT, OUTPUT))
    return simulate_steps(group, requests).models[model]


def cell(measures: ModelMeasures) -> str:
    """Share served, and the mean time between tokens of those."""
    share = measures.num_finished / measures.num_arrived
    return f"{share:.0%}, {measures.tbt.mean * 1e3:.1f} ms" if share else "0%"


if __name__ == "__main__":
    main()
