"""Long contexts by layout, simulated: which share of requests of each length is served, and how fast it decodes.

    python -m benchmarks.simulated_contexts                                             # the table
    python -m benchmarks.simulated_contexts --figure docs/assets/simulated_contexts.svg # and the figure

The paper's three models on its five GPUs of 40 GB. Prompts are log-uniform within each bin, outputs 256 tokens; the
models' own context limits are lifted, as with stretched rotary frequencies, so that only memory refuses.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

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
BINS = tuple(pairwise(EDGES))

Results = dict[tuple[str, tuple[int, int]], list[ModelMeasures]]
"""By model and bin, of every layout."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--figure", type=Path, help="where a picture of the table goes (.svg or .png)")
    figure = parser.parse_args().figure
    plan_input = PlanInput.model_validate(
        {"gpus": {"kind": "a100-40gb", "count": 5, "kv": 1}, "models": list(MODELS), "admission": "reserve"}
    )
    group = plan_deployment(plan_input).groups[0]
    layouts = [unlimited(simulated_group(group.models, group.split, plan_input, layout)) for layout in LAYOUTS]
    print("| model | tokens of context | " + " | ".join(LAYOUTS) + " |")
    print("| --- | --- |" + " ---: |" * len(LAYOUTS))
    results: Results = {}
    for model in MODELS:
        for low, high in BINS:
            measures = [served(layout, model, low * 1024, high * 1024) for layout in layouts]
            results[model, (low, high)] = measures
            print(f"| {model} | {low}-{high} Ki | " + " | ".join(map(cell, measures)) + " |", flush=True)
    if figure is not None:
        draw(results, figure)


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
    share = share_served(measures)
    return f"{share:.0%}, {measures.tbt.mean * 1e3:.1f} ms" if share else "0%"


def share_served(measures: ModelMeasures) -> float:
    return measures.num_finished / measures.num_arrived


def draw(results: Results, path: Path) -> None:
    """Share served above, time between tokens of the served below; a column for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(2, len(MODELS), figsize=(11, 5.2), layout="constrained", sharex=True, sharey="row")
    places = range(len(BINS))
    for column, model in enumerate(MODELS):
        shares, times = rows[0][column], rows[1][column]
        for index, layout in enumerate(LAYOUTS):
            of_layout = [results[model, edges][index] for edges in BINS]
            percents = [100 * share_served(measures) for measures in of_layout]
            tbt_ms = [measures.tbt.mean * 1e3 if measures.num_finished else np.nan for measures in of_layout]
            style = {"marker": "os^"[index], "linestyle": ("-", "--", ":")[index], "label": layout}
            shares.plot(places, percents, **style)
            times.plot(places, tbt_ms, **style)
        shares.set_title(model)
        times.set_xticks(places, [f"{low}-{high}" for low, high in BINS], rotation=40, ha="right")
    rows[0][0].set(ylabel="% of requests served", ylim=(-5, 105))
    rows[0][0].legend(loc="lower left")
    rows[1][0].set(ylabel="ms between tokens", ylim=(0, None))
    rows[1][1].set(xlabel="Ki tokens of prompt")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
