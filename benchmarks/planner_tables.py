"""Prints the tables of docs/concepts/planned-examples.md, and draws its figures.

python -m benchmarks.planner_tables                          # every table that needs no trace
python -m benchmarks.planner_tables paper pooling            # some of them
python -m benchmarks.planner_tables traces --traces DIR      # held-out halves of published traces
python -m benchmarks.planner_tables figures --output docs/assets
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.planning.cases import (
    ENGINE_SHARE,
    H200_COUNTS,
    PAPER,
    PAPER_ELASTIC,
    RATES,
    SEED,
    admitted,
    facts,
    h200_demand,
    h200_layouts,
    own_room,
    paper_split,
    pooling_gains,
)
from benchmarks.planning.contexts import BINS
from benchmarks.planning.figures import figures
from benchmarks.planning.traces import FILES, held_out_halves
from crosspool.planner.facts import ModelFacts
from crosspool.planner.layouts import Hosting, Room, seen_tokens, shard_bytes, static_hosting
from crosspool.planner.parallelism import monolithic_share_seen
from crosspool.units import GiB


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |")


def table(*header: str, left: int = 1) -> None:
    row(*header)
    row(*(("---" if idx < left else "---:") for idx in range(len(header))))


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
