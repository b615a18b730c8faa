"""The table of figures in README.md, made of the newest kept results: `python -m benchmarks.readme_figures`.

Run it after results have changed. A row whose result or metric is not there is left out, and told on standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, ROOT

BEGIN = "<!-- figures: made by python -m benchmarks.readme_figures -->"
END = "<!-- end of figures -->"
STEP = "decode_ms.qwen3-30b-a3b.1+1.b1.4k"
LAYOUTS = ("crosspool-1+1", "static-2", "elastic-2")
RANKS = ("w0.sigkill", "kv0.sigkill", "w0.sigstop")


@dataclass(frozen=True, slots=True)
class Figure:
    """One row: `value` and `beside` are formats of the metrics in their order, and of `limit`, the first one's."""

    what: str
    result: str  # `<what>_<hardware>` of the kept result
    metrics: tuple[str, ...]
    value: str
    beside: str = ""


FIGURES = (
    Figure(
        "A token of Qwen3-30B-A3B at batch 1, context 4,096: one KV GPU, one weights GPU (H200), step graphs",
        "decode_step_h200-x2",
        (f"{STEP}.fused.p50",),
        "{0:.2f} ms",
        "{limit:.2f} ms: its bytes, read once at copy bandwidth",
    ),
    Figure(
        "The same with `--control resident`",
        "decode_step_h200-x2",
        (f"{STEP}.resident.p50",),
        "{0:.2f} ms",
        "2.6 ms was asked for; vLLM: 4.49 ms whole on one GPU, 3.98 ms over two",
    ),
    Figure(
        "One layer of its experts for 1, 2, 4 and 8 tokens that share none, router included",
        "moe_layer_fused_h200",
        tuple(f"moe_us.qwen3-30b-a3b.b{batch}.p50" for batch in (1, 2, 4, 8)),
        "{0:.1f}, {1:.1f}, {2:.1f}, {3:.0f} us",
        "best published engines: 36.6, 54.5, 86.8, 164 us",
    ),
    Figure(
        "First token of a prompt of 4,096 tokens of it, and of 32,768",
        "prefill_h200-x2",
        ("ttft_ms.qwen3-30b-a3b.1+1.4k", "ttft_ms.qwen3-30b-a3b.1+1.32k"),
        "{0:.0f} ms, {1:,.0f} ms",
        "vLLM, whole on one GPU: 105 ms, 1,179 ms",
    ),
    Figure(
        "Three models decode on two H200s, saturated: resident control and two lanes, against one that the host drives",
        "ablation_h200-x2",
        ("ablation_gain", "ablation_arrivals_gain"),
        "{0:.2f} times the tokens/s; {1:.2f} at 0.5 requests/s of each",
        "the paper's two mechanisms, switched off and on",
    ),
    Figure(
        "One request of Qwen3-30B-A3B over the whole KV pool of 128 GiB, and a step of it (one KV, one weights GPU)",
        "long_request_h200-x2",
        ("one_request_decode_ms.qwen3-30b-a3b.1+1.1368k.p50", "one_request_tokens.qwen3-30b-a3b.1+1"),
        "{1:,.0f} tokens, {0:.1f} ms",
        "{limit:.1f} ms: its bytes; same tokens as a float32 model",
    ),
    Figure(
        "Two equal lanes of Qwen3-30B-A3B through whole steps on two H200s, against one lane",
        "lanes_h200-x2",
        ("two_lanes_gain.qwen3-30b-a3b.b1+qwen3-30b-a3b.b1.4k.fused",),
        "{0:.2f} times the tokens/s",
        "{limit:.2f}: what the busier pool alone would allow",
    ),
    Figure(
        "One request of GLM-4.7-Flash over two KV GPUs of 24 GiB each; a step of it at 128K and at 895K",
        "split_kv_h200-x2",
        (
            "one_request_tokens.glm-4.7-flash.2+1",
            "split_kv_decode_ms.glm-4.7-flash.2+1.128k.p50",
            "split_kv_decode_ms.glm-4.7-flash.2+1.895k.p50",
            "split_kv_decode_ms.glm-4.7-flash.1+1.128k.p50",
            "split_kv_decode_ms.glm-4.7-flash.1+1.895k.p50",
        ),
        "{0:,.0f} tokens; {1:.1f} ms, {2:.1f} ms",
        "one KV GPU: {3:.1f} ms (**faster**), {4:.1f} ms",
    ),
    Figure(
        "A rank killed, or a weights rank stopped, while three full models answer over HTTP: service is back after",
        "recovery_h200-x2",
        tuple(f"recovery_s.{rank}" for rank in RANKS),
        "{least:.1f} to {most:.1f} s",
        "{limit:.0f} s was asked for; 134.5 GiB of FFN are read again",
    ),
    Figure(
        "First token of three models under load over HTTP, two H200s: P50 and P99",
        "layouts_h200-x2",
        tuple(f"ttft_ms.{layout}.all.0.8.{level}" for layout in LAYOUTS for level in ("p50", "p99")),
        "{0:.0f}, {1:,.0f} ms",
        "our engine without pools, whose prompts then always stepped aside: static {2:.0f}, {3:,.0f} ms; "
        "elastic {4:.0f}, {5:,.0f} ms",
    ),
    Figure(
        "**Slower:** between Qwen3's tokens in the same load: P50 and P99",
        "layouts_h200-x2",
        tuple(f"tbt_ms.{layout}.qwen3-30b-a3b.0.8.{level}" for layout in LAYOUTS for level in ("p50", "p99")),
        "{0:.1f}, {1:.1f} ms",
        "static {2:.1f}, {3:.1f} ms; elastic {4:.1f}, {5:.1f} ms",
    ),
    Figure(
        "The same with a quarter of every FFN beside attention (`--weights-shares 3,1`)",
        "layouts_h200-x2",
        (
            *(f"tbt_ms.crosspool-1+1s.qwen3-30b-a3b.0.8.{level}" for level in ("p50", "p99")),
            *(f"tbt_ms.{layout}.glm-4.7-flash.0.8.p99" for layout in ("crosspool-1+1s", "static-2", "elastic-2")),
        ),
        "{0:.1f}, {1:.1f} ms",
        "GLM-4.7-Flash at P99: {2:.1f} ms; static {3:.1f}, elastic {4:.1f}",
    ),
    Figure(
        "**Slower:** P50 between Qwen3's tokens under load, both pools on *one* H200",
        "layouts_h200",
        ("tbt_ms.crosspool-1.qwen3-30b-a3b.0.8.p50", "tbt_ms.static-1.qwen3-30b-a3b.0.8.p50"),
        "{0:.1f} ms",
        "{1:.1f} ms with whole models side by side",
    ),
    Figure(
        "HTTP server on one core: tokens streamed a second, and what it adds to a first token at P99",
        "server_cpu",
        ("sse_tokens_per_s", "server_ttft_overhead_ms.p99"),
        "{0:,.0f}, {1:.1f} ms",
        "beside 100 other streams",
    ),
    Figure(
        "Demo models on two CPU cores, one request and eight over three models",
        "demo_cpu",
        ("decode_ratio_vs_transformers.b1", "decode_ratio_vs_transformers.c8"),
        "{0:.1f} and {1:.1f} times",
        "transformers on the same cores",
    ),
)


def table(results: Path, left_out: list[str]) -> str:
    """A Markdown table of the figures that `results` holds; appends to `left_out` why the others are not there."""
    rows = ["| what | CrossPool | beside it | result |", "| --- | --- | --- | --- |"]
    for figure in FIGURES:
        found = sorted(results.glob(f"{figure.result}_????-??-??.json"))
        if not found:
            left_out.append(f"{figure.result}: no result")
            continue
        kept = json.loads(found[-1].read_text(encoding="utf-8"))
        missing = [name for name in figure.metrics if name not in kept["metrics"]]
        if missing:
            left_out.append(f"{found[-1].name}: no {missing[0]}")
            continue
        link = f"[{figure.result}](benchmarks/results/{found[-1].stem}.md)"
        rows.append(f"| {figure.what} | {_written(figure.value, figure, kept)} | {_beside(figure, kept)} | {link} |")
    return "\n".join(rows)


def with_table(text: str, made: str) -> str:
    """`text` with `made` between the two marks. Raises ValueError where they are not there once each, in order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the text must hold {BEGIN!r} and behind it {END!r}, once each")
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    return f"{head}{BEGIN}\n\n{made}\n\n{END}{tail}"


def _written(form: str, figure: Figure, kept: Mapping[str, Any]) -> str:
    values = [kept["metrics"][name] for name in figure.metrics]
    limit = kept.get("limits", {}).get(figure.metrics[0])
    return form.format(*values, least=min(values), most=max(values), limit=limit)


def _beside(figure: Figure, kept: Mapping[str, Any]) -> str:
    has_limit = kept.get("limits", {}).get(figure.metrics[0]) is not None
    return _written(figure.beside, figure, kept) if has_limit or "{limit" not in figure.beside else ""


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    left_out: list[str] = []
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8"), table(RESULTS, left_out)), encoding="utf-8")
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
