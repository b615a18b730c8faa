"""Prints the tables of docs/guides/planning.md, and draws its figures.

python -m benchmarks.planner_tables                          # every table that needs no trace
python -m benchmarks.planner_tables paper pooling            # some of them
python -m benchmarks.planner_tables traces --traces DIR      # held-out halves of published traces
python -m benchmarks.planner_tables figures --output docs/assets
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner_contexts import BINS, admitted_monolithic, admitted_pool, draw_wishes
from benchmarks.planner_traces import FILES, held_out_halves
from crosspool.planner.catalogue import catalogue_facts
from crosspool.planner.demand import ModelLoad
from crosspool.planner.deployment import parse_plan_input
from crosspool.planner.facts import ModelFacts
from crosspool.planner.group import GPUSet, Split, split_group
from crosspool.planner.holding import Holding
from crosspool.planner.layouts import Hosting, Room, seen_tokens, shard_bytes, static_hosting
from crosspool.planner.memory import MemoryFigures, StepBounds
from crosspool.planner.parallelism import monolithic_share_seen
from crosspool.planner.plan import GroupPlan, LayoutResult
from crosspool.planner.planner import plan_deployment
from crosspool.planner.pool_demand import estimate_pool
from crosspool.planner.request_table import SteadySpeed, table_from_lengths
from crosspool.units import GiB
from crosspool.workload.arrivals import GammaBursts, Poisson
from crosspool.workload.lengths import Lognormal

PAPER = ("qwen3-30b-a3b", "glm-4.7-flash", "deepseek-v2-lite")
PAPER_GPU_BYTES = 40 * 10**9
PAPER_ELASTIC: Hosting = (
    (PAPER[0], PAPER[2]),
    (PAPER[0], PAPER[1]),
    (PAPER[0], PAPER[1]),
    (PAPER[0], PAPER[1]),
    (PAPER[1], PAPER[2]),
)
ENGINE_SHARE = 0.85
"""Part of a GPU that engines with weights and KV together commonly give to both; the rest is theirs."""
SEED = 7
TRIALS = 200
H200_COUNTS = (2, 4, 8)
RATES = {"chat": (0.5, 2.0), "agent": (0.05, 0.2)}
"""Requests per second and model."""
LENGTHS = {
    "chat": {"prompt": 862, "output": 665, "prompt_cv": 0.9, "output_cv": 0.2},
    "agent": {"prompt": 60770, "output": 743, "prompt_cv": 1.0, "output_cv": 1.5, "longest": 131072},
}


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |")


def table(*header: str, left: int = 1) -> None:
    row(*header)
    row(*(("---" if idx < left else "---:") for idx in range(len(header))))


def facts(names: Iterable[str]) -> list[ModelFacts]:
    return [catalogue_facts(name) for name in names]


def paper_split() -> Split:
    gpus = GPUSet(num_gpus=5, memory_bytes=PAPER_GPU_BYTES)
    return split_group(facts(PAPER), gpus, 1, StepBounds(), MemoryFigures())


def own_room() -> Room:
    """What our planner leaves of one of the five GPUs for weights and KV."""
    parts = paper_split().gpus[0].parts
    beside = sum(parts[name] for name in ("activations", "logits", "graphs", "runtime", "reserve"))
    return Room(num_gpus=5, bytes_per_gpu=PAPER_GPU_BYTES - beside)


def paper() -> None:
    print("\nWhat one request sees of four GPUs' KV memory, weights and KV together:\n")
    table("model", "attention", "KV heads", "KV B/token", "weights GB", "share seen of 4 GPUs", "CrossPool")
    names = ("llama-30b", "qwen3-32b", "mixtral-8x7b", "qwen3-30b-a3b", "qwen3-next-80b-a3b", *PAPER[1:])
    for model in facts(names):
        share = monolithic_share_seen(model.num_kv_heads, 4)
        size = f"{model.weight_bytes / 1e9:.1f}"
        row(model.name, model.attention_kind, model.num_kv_heads, f"{model.kv_bytes_per_token:,}", size, share, "1.0")
    print("\nThree placements on 5 x 40 GB: GB of weights and of KV on each GPU, tokens one request sees:\n")
    table("placement", *(f"GPU {gpu}" for gpu in range(5)), "KV GB", "Qwen3", "GLM", "DeepSeek")
    models, room = facts(PAPER), own_room()
    for label, hosting in (("static", static_hosting(models, room)), ("elastic", PAPER_ELASTIC)):
        assert hosting is not None
        _paper_row(label, models, hosting, room)
    split = paper_split()
    kv = split.budget_bytes / 1e9
    cells = [
        f"{gpu.rank}: {(gpu.parts.get('attention_weights', 0) + gpu.parts.get('ffn_weights', 0)) / 1e9:.1f}"
        for gpu in split.gpus
    ]
    seen = [f"{split.budget_bytes // model.kv_bytes_per_token:,}" for model in models]
    row("crosspool", *cells, f"{kv:.1f}", *seen)


def _paper_row(label: str, models: Sequence[ModelFacts], hosting: Hosting, room: Room) -> None:
    degrees = {model.name: sum(model.name in names for names in hosting) for model in models}
    by_name = {model.name: model for model in models}
    weights = [sum(shard_bytes(by_name[name], degrees[name]) for name in names) for names in hosting]
    free = [room.bytes_per_gpu - size for size in weights]
    letters = ["+".join(name[0].upper() for name in names) for names in hosting]
    cells = [f"{letter}: {size / 1e9:.1f}" for letter, size in zip(letters, weights, strict=True)]
    seen = [
        f"{seen_tokens(model, [free[gpu] for gpu, names in enumerate(hosting) if model.name in names]):,}"
        for model in models
    ]
    row(label, *cells, f"{sum(free) / 1e9:.1f}", *seen)


def admitted(each: int, share: float | None) -> dict[str, list[float]]:
    """Percent of requests admitted by layout and bin. share: part of a GPU that weights and KV get; None: ours."""
    models, split = facts(PAPER), paper_split()
    room = own_room() if share is None else Room(num_gpus=5, bytes_per_gpu=int(PAPER_GPU_BYTES * share))
    static = static_hosting(models, own_room())
    assert static is not None
    found: dict[str, list[float]] = {"static": [], "elastic": [], "crosspool": []}
    for bin_k in BINS:
        counts = dict.fromkeys(found, 0)
        for trial in range(TRIALS):
            wishes = draw_wishes(models, bin_k, each, SEED + trial)
            counts["static"] += admitted_monolithic(wishes, static, room)
            counts["elastic"] += admitted_monolithic(wishes, PAPER_ELASTIC, room)
            counts["crosspool"] += admitted_pool(wishes, split)
        for layout, count in counts.items():
            found[layout].append(100.0 * count / (TRIALS * each * len(models)))
    return found


def contexts() -> None:
    for each, share in ((1, None), (1, ENGINE_SHARE), (4, None), (4, ENGINE_SHARE)):
        kept = "as ours" if share is None else f"{1 - share:.0%}"
        print(
            f"\nPercent of requests admitted, {each} of each model at once; weights and KV together keep back {kept}:\n"
        )
        table("layout", *(f"{low}-{high}K" for low, high in BINS))
        for layout, percents in admitted(each, share).items():
            row(layout, *(f"{percent:.0f}" for percent in percents))


def h200() -> None:
    print("\nThree paper models on H200s, reserve and runtime kept back (`seen`: tokens of one request):\n")
    table("GPUs", "layout", "KV GiB", "Qwen3 seen", "GLM seen", "DeepSeek seen", left=2)
    for count, name, result in h200_layouts():
        seen = [f"{result.seen_tokens[model]:,}" for model in PAPER]
        row(count, name, f"{result.kv_bytes / GiB:.1f}" if result.fits else result.note, *seen)
    print("\nDemand by traffic, service times by roofline, P99:\n")
    table(
        "GPUs",
        "traffic",
        "requests/s a model",
        "split",
        "ms/token Qwen3",
        "mean GiB",
        "P99 GiB",
        "budget GiB",
        "covered %",
        left=2,
    )
    for count in H200_COUNTS:
        for traffic, rates in RATES.items():
            for rate in rates:
                _h200_row(count, traffic, rate)


def h200_layouts() -> Iterator[tuple[int, str, LayoutResult]]:
    """GPUs, name and result of each layout of the three paper models on H200s."""
    for count in H200_COUNTS:
        for num_kv in sorted({1, count // 2}):
            given = {"gpus": {"kind": "h200", "count": count, "kv": num_kv}, "models": list(PAPER)}
            layouts = plan_deployment(parse_plan_input(given)).plan.layouts
            for result in layouts if num_kv == 1 else layouts[:1]:
                name = f"crosspool {num_kv} + {count - num_kv}" if result.layout == "crosspool" else result.layout
                yield count, name, result


def h200_demand(count: int, traffic: str, rate: float) -> GroupPlan:
    """The plan of the three paper models under one kind of traffic, on the fastest split that fits."""
    models = [{"model": name, "rate": rate, "lengths": LENGTHS[traffic]} for name in PAPER]
    engine = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    given = {"gpus": {"kind": "h200", "count": count}, "models": models, "precision": 0.02, "engine": engine}
    return plan_deployment(parse_plan_input(given)).plan.groups[0]


def _h200_row(count: int, traffic: str, rate: float) -> None:
    group = h200_demand(count, traffic, rate)
    row(
        count,
        traffic,
        rate,
        f"{len(group.kv_ranks)} + {len(group.weights_ranks)}",
        f"{group.model(PAPER[0]).tbt_s * 1e3:.1f}",
        f"{group.mean_bytes / GiB:.2f}",
        f"{group.required_bytes / GiB:.2f}",
        f"{group.budget_bytes / GiB:.1f}",
        f"{group.coverage * 100:.2f}",
    )


def cold_loads(num_models: int, cv: float) -> list[ModelLoad]:
    """Cold models of catalogue KV sizes, 0.05 requests/s each, reasoning-like lengths, 20 ms a token."""
    names = (*PAPER, "gpt-oss-20b", "mixtral-8x7b", "glm-4.5-air")
    loads = []
    for idx in range(num_models):
        model = catalogue_facts(names[idx % len(names)], f"cold-{idx}")
        geometry = model.geometry(2 << 20)
        lengths = Lognormal(prompt_mean=1268, output_mean=1527, prompt_cv=2.0, output_cv=1.5, longest=32768)
        requests = table_from_lengths(lengths, SteadySpeed(tbt_s=0.02), np.random.default_rng([SEED, idx]))
        holding = Holding(
            policy="forecast",
            kv_bytes_per_token=model.kv_bytes_per_token,
            page_tokens=geometry.page_tokens,
            page_bytes=geometry.page_bytes,
        )
        arrivals = Poisson(rate_rps=0.05) if cv == 1 else GammaBursts(rate_rps=0.05, cv=cv)
        loads.append(ModelLoad(name=model.name, arrivals=arrivals, requests=requests, holding=holding))
    return loads


def pooling_gains(cv: float) -> list[tuple[int, float, float]]:
    """(models, P99 of the sum in GiB, gain) for 2 to 300 models."""
    gains = []
    for num_models in (2, 3, 5, 10, 30, 100, 300):
        demand = estimate_pool(cold_loads(num_models, cv), precision=0.02, seed=SEED)
        gains.append((num_models, demand.paged.value / GiB, demand.pooling_gain))
    return gains


def pooling() -> None:
    print("\nSum of the models' own P99 over P99 of their sum:\n")
    table("models", "Poisson: P99 GiB", "gain", "bursts (cv 4): P99 GiB", "gain")
    for poisson, bursts in zip(pooling_gains(1.0), pooling_gains(4.0), strict=True):
        row(poisson[0], f"{poisson[1]:.1f}", f"{poisson[2]:.2f}", f"{bursts[1]:.1f}", f"{bursts[2]:.2f}")


def seen() -> None:
    print("\nShare of a group's KV memory that one request sees, weights and KV together / CrossPool:\n")
    table("model", "attention", "KV heads", "2 GPUs", "4 GPUs", "8 GPUs", left=2)
    for model in facts(("olmoe-1b-7b", "mixtral-8x7b", "qwen3-30b-a3b", "qwen3-next-80b-a3b", "glm-4.7-flash")):
        shares = [f"{monolithic_share_seen(model.num_kv_heads, gpus):g} / 1" for gpus in (2, 4, 8)]
        row(model.name, model.attention_kind, model.num_kv_heads, *shares)


def traces(folder: Path) -> None:
    print("\nBudget from one half of a trace, time over it in the other half:\n")
    columns = ("P95 budget GiB", "over it in the other half", "95 % interval for 5 %", "inside")
    table("trace", "planned on", "requests/s there, elsewhere", "mean KV GiB there, elsewhere", *columns, left=2)
    for label, file in FILES.items():
        for half in held_out_halves(folder, file, SEED):
            rates = ", ".join(f"{rate:.2f}" for rate in half.rates_rps)
            means = ", ".join(f"{size / GiB:.2f}" for size in half.mean_bytes)
            interval = f"{half.low:.1%} .. {half.high:.1%} ({half.effective_samples:.0f} moments)"
            budget = f"{half.budget_bytes / GiB:.2f}"
            inside = "yes" if half.is_inside else "no"
            row(label, half.planned, rates, means, budget, f"{half.over:.1%}", interval, inside)


def figures(folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
    for panel, share in zip(axes, (None, ENGINE_SHARE), strict=True):
        for layout, percents in admitted(1, share).items():
            panel.plot(range(len(BINS)), percents, marker="o", label=layout)
        panel.set_xticks(range(len(BINS)), [f"{low}-{high}K" for low, high in BINS])
        kept = "the same kept back in all layouts" if share is None else "15 % kept back with weights and KV together"
        panel.set(xlabel="prompt tokens", title=kept)
    axes[0].set(ylabel="% of requests admitted")
    axes[0].legend()
    figure.savefig(folder / "planner_contexts.svg")
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for label, cv in (("Poisson", 1.0), ("bursts, cv 4", 4.0)):
        gains = pooling_gains(cv)
        axes.plot([gain[0] for gain in gains], [gain[2] for gain in gains], marker="o", label=label)
    axes.set(xscale="log", xlabel="models", ylabel="sum of P99 over P99 of the sum")
    axes.legend()
    figure.savefig(folder / "planner_pooling_gain.svg")
    _h200_figure(pyplot).savefig(folder / "planner_h200.svg")
    print(f"wrote planner_contexts.svg, planner_pooling_gain.svg and planner_h200.svg to {folder}")


def _h200_figure(pyplot: Any) -> Any:
    """What one request of each model sees by layout, and the P99 of demand by traffic, on 2, 4 and 8 H200s."""
    figure, (contexts, demand) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained", width_ratios=(3, 2))
    results = list(h200_layouts())
    places = range(len(results))
    for offset, model in zip((-0.25, 0.0, 0.25), PAPER, strict=True):
        tokens = [result.seen_tokens[model] / 1e6 for _, _, result in results]
        contexts.bar([place + offset for place in places], tokens, width=0.25, label=model)
    contexts.set_xticks(places, [f"{count} x\n{name}" for count, name, _ in results], rotation=90, fontsize=8)
    contexts.set(ylabel="million tokens one request sees", title="Longest context by layout, H200", yscale="log")
    contexts.legend(fontsize=8)
    for traffic, rates in RATES.items():
        for rate in rates:
            p99 = [h200_demand(count, traffic, rate).required_bytes / GiB for count in H200_COUNTS]
            demand.plot(range(len(H200_COUNTS)), p99, marker="o", label=f"{traffic}, {rate:g} requests/s a model")
    demand.set_xticks(range(len(H200_COUNTS)), [f"{count} x H200" for count in H200_COUNTS])
    demand.set(ylabel="GiB", title="P99 of live KV by traffic", yscale="log")
    demand.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    return figure


TABLES: dict[str, Callable[[], None]] = {
    "paper": paper,
    "contexts": contexts,
    "h200": h200,
    "pooling": pooling,
    "seen": seen,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", help=f"{', '.join(TABLES)}, traces, figures")
    parser.add_argument("--traces", type=Path, help="folder of the published traces")
    parser.add_argument("--output", type=Path, default=Path("docs/assets"), help="where figures go")
    args = parser.parse_args()
    for name in args.tables or TABLES:
        if name == "traces":
            if args.traces is None:
                parser.error("traces needs --traces DIR")
            traces(args.traces)
        elif name == "figures":
            figures(args.output)
        elif name in TABLES:
            TABLES[name]()
        else:
            parser.error(f"no table {name!r}; there are {', '.join(TABLES)}, traces and figures")


if __name__ == "__main__":
    main()
