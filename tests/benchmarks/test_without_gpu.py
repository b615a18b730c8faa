"""A script for GPUs says in one line that there is none, whatever it would import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks
from benchmarks import ALIKE_ON_CPUS, FOR_GPUS, missing_gpu

FOLDER = Path(benchmarks.__file__).parent


def words(name, *more):
    return ["python", "-m", f"benchmarks.bench_{name}", *more]


def test_every_name_is_a_script_and_every_script_that_imports_cuda_is_named():
    scripts = {path.stem.removeprefix("bench_"): path.read_text() for path in FOLDER.glob("bench_*.py")}
    assert set(scripts) >= FOR_GPUS
    with_torch = {name for name, text in scripts.items() if "import torch\n" in text or "from cuda.bindings" in text}
    instead = {name for name in scripts for told in ALIKE_ON_CPUS.values() if f"bench_{name}" in told}
    assert with_torch <= FOR_GPUS | instead, "name them in benchmarks/__init__.py"


@pytest.mark.parametrize("name", sorted(FOR_GPUS))
def test_without_a_driver_the_reason_and_what_runs_instead_are_told(name):
    told = missing_gpu(words(name), has_driver=False)
    assert f"benchmarks.bench_{name} measures NVIDIA GPUs" in told
    assert told.endswith(ALIKE_ON_CPUS.get(name, "nothing like it runs on CPUs"))
    assert missing_gpu(words(name), has_driver=True) is None
    assert missing_gpu(words(name, "--help"), has_driver=False) is None


def test_numpy_and_other_scripts_run_anywhere():
    assert missing_gpu(words("ablation", "--backend", "numpy"), has_driver=False) is None
    assert missing_gpu(words("step_host", "--no-devices"), has_driver=False) is None
    assert missing_gpu(words("layouts_gpu"), has_driver=False) is None, "it has an answer of its own"
    assert missing_gpu(["pytest", "-q"], has_driver=False) is None
    assert missing_gpu(["python", "-m"], has_driver=False) is None


def test_the_command_ends_before_anything_is_imported():
    code = "import ctypes\ndef none(_): raise OSError\nctypes.CDLL = none\nimport sys\n"
    code += "sys.orig_argv = ['python', '-m', 'benchmarks.bench_lanes']\nimport benchmarks"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=FOLDER.parent)
    assert done.returncode == 1
    assert done.stderr.startswith("error: benchmarks.bench_lanes measures NVIDIA GPUs")
    assert "Traceback" not in done.stderr
