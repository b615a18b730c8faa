"""How other engines serve the same three models on the same GPUs: their processes, as data.

A layout gives each model its GPUs; an engine turns that into a command and its environment. The settings are those that
were found to work and to serve the engine best on two H200s with vLLM 0.24.0 and kvcached 0.1.6; SGLang's follow the
documentation of 0.5.23 and have not run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.full_models import CONFIGS
from crosspool.planner.catalogue import catalogue_facts
from crosspool.units import GiB

FIRST_PORT = 8501
CAPTURE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)

STATIC = {"qwen3-30b-a3b": (0,), "glm-4.7-flash": (1,), "deepseek-v2-lite": (1,)}
BOTH_GPUS = dict.fromkeys(STATIC, (0, 1))

PEERS: dict[str, tuple[str, Mapping[str, tuple[int, ...]]]] = {
    "vllm-static-2": ("vllm", STATIC),
    "kvcached-2": ("kvcached", BOTH_GPUS),
    "kvcached-static-2": ("kvcached", STATIC),
    "sglang-static-2": ("sglang", STATIC),
}
"""Name of a layout in the results: the engine, and each model's GPUs."""

# No multicast between the GPUs, and no FlashInfer sampler where FlashInfer is not installed.
QUIET = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "NCCL_NVLS_ENABLE": "0"}

GPU_BYTES = 140 * GiB
"""Free on an H200 with nothing on it."""

BESIDE_BYTES = 6 * GiB
"""What an instance takes beside weights and KV: activations of a step, graphs, its context."""

ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerOptions:
    """tokens_per_step: of prefill and decode together. kv_bytes: of each model's KV on each GPU (vLLM)."""

    tokens_per_step: int = 8192
    kv_bytes: int = 20 * GiB
    max_model_len: int = 32768

    def __post_init__(self) -> None:
        for name in ("tokens_per_step", "kv_bytes", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One server process of one model."""

    model: str
    port: int
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def instances(peer: str, models: Path, plugin: Path, options: PeerOptions) -> list[Instance]:
    """The processes of a layout, in the order in which they start.

    models: folder of model directories (`write_peer_dir`); plugin: folder of `spread_weights.write_plugin`.
    """
    if peer not in PEERS:
        raise ValueError(f"peer is {peer!r}; it must be one of {', '.join(PEERS)}")
    engine, placement = PEERS[peer]
    found = []
    shares = memory_shares(placement, options.kv_bytes) if engine == "sglang" else {}
    for offset, (model, gpus) in enumerate(placement.items()):
        port = FIRST_PORT + offset
        command = (_sglang if engine == "sglang" else _vllm)(models / model, port, len(gpus), options)
        if engine == "sglang":
            command = (*command, "--mem-fraction-static", f"{shares[model]:.3f}")
        if engine == "vllm":
            # Its KV is given in bytes; the share only has to be free at the start, beside another instance too.
            command = (*command, "--gpu-memory-utilization", "0.3", "--kv-cache-memory-bytes", str(options.kv_bytes))
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "PYTHONPATH": str(plugin), **QUIET}
        if engine == "kvcached":
            environment |= {"ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
            is_latent = "kv_lora_rank" in CONFIGS[model]
            environment["KVCACHED_CONTIGUOUS_LAYOUT"] = "true" if is_latent else "false"
        found.append(Instance(model=model, port=port, command=command, environment=environment))
    return found


def memory_shares(placement: Mapping[str, tuple[int, ...]], kv_bytes: int) -> dict[str, float]:
    """SGLang's share of memory for weights and KV, by model: of what is free on its GPUs when it starts, after those
    that started before it. Raises ValueError where one has no room.
    """
    free = dict.fromkeys(sorted({gpu for gpus in placement.values() for gpu in gpus}), float(GPU_BYTES))
    shares = {}
    for model, gpus in placement.items():
        facts = catalogue_facts(model)
        static = (facts.ffn_bytes + facts.kv_pool_weight_bytes) / len(gpus) + kv_bytes
        room = min(free[gpu] for gpu in gpus)
        if static + BESIDE_BYTES > room:
            raise ValueError(
                f"{model} wants {(static + BESIDE_BYTES) / GiB:.0f} GiB of a GPU that has {room / GiB:.0f}; "
                "give less KV (--kv-gib)"
            )
        shares[model] = static / room
        free |= {gpu: free[gpu] - static - BESIDE_BYTES for gpu in gpus}
    return shares


def _vllm(directory: Path, port: int, num_gpus: int, options: PeerOptions) -> tuple[str, ...]:
    graphs = json.dumps({"cudagraph_capture_sizes": CAPTURE_SIZES})
    words = ["vllm", "serve", str(directory), "--served-model-name", directory.name, "--port", str(port)]
    words += ["--load-format", "dummy", "--no-enable-prefix-caching", "--tensor-parallel-size", str(num_gpus)]
    words += ["--max-num-batched-tokens", str(options.tokens_per_step), "--max-model-len", str(options.max_model_len)]
    return (*words, "--compilation-config", graphs)


def _sglang(directory: Path, port: int, num_gpus: int, options: PeerOptions) -> tuple[str, ...]:
    words = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(directory), "--port", str(port)]
    words += ["--served-model-name", directory.name, "--load-format", "dummy", "--disable-radix-cache"]
    words += ["--tp", str(num_gpus), "--chunked-prefill-size", str(options.tokens_per_step)]
    return (*words, "--context-length", str(options.max_model_len), "--enable-metrics")


def write_peer_dir(directory: Path, model: str) -> Path:
    """A model directory as `full_models.write_model_dir` makes it, with what transformers wants beside it."""
    from benchmarks.full_models import write_model_dir

    path = write_model_dir(directory, model)
    config = {**CONFIGS[model], "architectures": [ARCHITECTURES[CONFIGS[model]["model_type"]]]}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return path
