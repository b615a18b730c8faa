"""What does a step cost beyond its kernels, by what makes it follow the one before it?

    python -m benchmarks.bench_device_loop [--lines FILE] [--out DIRECTORY]

Compiles and runs `device_loop.cu` (nvcc): steps of 1, 9 and 200 kernels, queued by the host, in WHILE and IF nodes, and
launched by a dispatcher on the device, the paper's variant. Figures are microseconds a step beyond the same kernels in
one graph. `--lines` reads what an earlier run of the program printed.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

from benchmarks.report import RESULTS, Report

SOURCE = Path(__file__).with_name("device_loop.cu")
NOTES = {
    "one_graph_us": "the step's kernels, all steps in one graph",
    "queued_replay_us": "a graph a step, queued by the host",
    "queued_replay_host_us": "host time of it",
    "while_child_us": "WHILE node around the captured step: what runs use",
    "while_child_host_us": "host time, a launch for 60 steps",
    "while_captured_us": "WHILE node, the step captured into its body",
    "queued_if_us": "a graph a step with an IF node around it",
    "skipped_if_us": "the same where the condition is false",
    "dispatched_us": "a dispatcher launches step and itself as tails, on the device: the paper's variant",
}


def run_program() -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "device_loop"
        command = [
            "nvcc",
            "-std=c++17",
            "-O2",
            "-rdc=true",
            "-arch=native",
            "-o",
            str(program),
            str(SOURCE),
            "-lcudadevrt",
        ]
        subprocess.run(command, check=True)
        return subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()


def add_lines(report: Report, lines: list[str]) -> None:
    """One figure a line. Raises RuntimeError for a line that tells of a failure."""
    for line in lines:
        name, _, value = line.partition(" ")
        kind = name.partition(".")[0]
        if kind not in NOTES and not kind.startswith("while_"):
            raise RuntimeError(f"the program said: {line}")
        report.metric(name, float(value), note=NOTES.get(kind, ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lines", type=Path, help="what the program printed before")
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    report = Report("device_loop", hardware=options.hardware, config={"steps": 60, "rounds": 15})
    add_lines(report, options.lines.read_text().splitlines() if options.lines else run_program())
    whiles = [value for name, value in report.metrics.items() if name.startswith("while_child_us.")]
    dispatched = [value for name, value in report.metrics.items() if name.startswith("dispatched_us.")]
    report.summary = (
        f"A loop on the device costs {min(whiles):.1f} to {max(whiles):.1f} us a step more than one graph of all "
        f"steps, a dispatcher that launches captured graphs {min(dispatched):.1f} to {max(dispatched):.1f}. Kernels in "
        "a loop's body still overlap by programmatic launch. A replay that the host queues costs 1 us on the device, 2 "
        "on the host."
    )
    report.write(options.out)
    print(report.as_markdown())


if __name__ == "__main__":
    main()
