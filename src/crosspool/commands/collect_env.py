"""`crosspool collect-env`: what a bug report should say about the machine. No names, addresses or keys in it."""

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata

from crosspool import __version__
from crosspool.deployment.preflight import physical_memory_bytes
from crosspool.units import GiB

PACKAGES = (
    "fastapi",
    "numpy",
    "ml-dtypes",
    "safetensors",
    "starlette",
    "tokenizers",
    "transformers",
    "uvicorn",
    "uvloop",
    "httptools",
    "llguidance",
    "torch",
    "triton",
    "cuda-bindings",
)
GPU_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
QUERY_TIMEOUT_S = 10


def run(*, as_json: bool) -> None:
    facts = environment()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")


def environment() -> dict[str, str]:
    """Versions and sizes, in the order in which they are printed; packages that are not installed are left out."""
    facts = {
        "crosspool": __version__,
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu_cores": str(os.cpu_count()),
        "memory": _memory(),
        "gpus": _gpus(),
    }
    for package in PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return facts


def _memory() -> str:
    found = physical_memory_bytes()
    return "unknown" if found is None else f"{found / GiB:.1f} GiB"


def _gpus() -> str:
    if shutil.which(GPU_QUERY[0]) is None:
        return "none found (no nvidia-smi)"
    try:
        answer = subprocess.run(GPU_QUERY, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed: {type(error).__name__}"
    return "; ".join(line.strip() for line in answer.stdout.splitlines() if line.strip()) or "none"
