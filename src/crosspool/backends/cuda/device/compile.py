"""Compiles the sources in `csrc` at first use, with nvcc where it is installed and NVRTC elsewhere.

Binaries are cached by a hash of source, headers and flags, so an edit never meets a stale one.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "csrc"
NVCC_FLAGS = ("-std=c++17", "-O3", "-cubin")


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "crosspool" / "kernels"


def architecture(capability: tuple[int, int]) -> str:
    """`sm_90a` for (9, 0). Hopper and later get their architecture-specific feature set."""
    major, minor = capability
    if major < 8:
        raise ValueError(f"the kernels need compute capability 8.0 or newer; this GPU has {major}.{minor}")
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def source_hash(stem: str, arch: str) -> str:
    """Changes with the source, any header, a flag or the architecture."""
    digest = hashlib.sha256(" ".join((arch, *NVCC_FLAGS)).encode())
    for path in (*sorted(SOURCES.glob("*.cuh")), SOURCES / f"{stem}.cu"):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def cubin(stem: str, arch: str, cache_dir: Path | None = None) -> Path:
    """Path of the compiled `csrc/<stem>.cu`; compiled now if no cached binary matches. RuntimeError with the log."""
    directory = cache_dir or default_cache_dir()
    target = directory / f"{stem}-{arch}-{source_hash(stem, arch)}.cubin"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    nvcc = shutil.which("nvcc")
    code = _nvcc(nvcc, stem, arch) if nvcc else _nvrtc(stem, arch)
    with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
        file.write(code)
    os.replace(file.name, target)  # two processes may compile at once; each leaves a whole file
    return target


def _nvcc(nvcc: str, stem: str, arch: str) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.cubin"
        gencode = f"-gencode=arch=compute_{arch.removeprefix('sm_')},code={arch}"
        command = [nvcc, *NVCC_FLAGS, gencode, "-o", str(out), str(SOURCES / f"{stem}.cu")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"nvcc could not compile {stem}.cu for {arch}:\n{done.stderr}")
        return out.read_bytes()


def _nvrtc(stem: str, arch: str) -> bytes:
    from cuda.bindings import nvrtc  # only where nvcc is absent

    text = (SOURCES / f"{stem}.cu").read_bytes()
    _, program = nvrtc.nvrtcCreateProgram(text, f"{stem}.cu".encode(), 0, [], [])
    options = [b"--std=c++17", f"--gpu-architecture={arch}".encode(), f"--include-path={SOURCES}".encode()]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC could not compile {stem}.cu for {arch}:\n{log.decode(errors='replace')}")
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    code = b" " * size
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return code
