"""Does the CUDA backend compute what transformers computes, at full size, on the same random weights?

    python -m benchmarks.bench_equality [--out DIRECTORY] [--models qwen3-30b-a3b,...]

Both sides hold the same storage. Three forwards of the same tokens: transformers in bf16, transformers in fp32 (a layer
at a time), ours token by token. Layers are also run alone on the reference's input.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.full_models import CONFIGS, full_spec
from benchmarks.gpu_timing import guarded, seeded_cache, write_failures
from benchmarks.report import RESULTS, Report
from benchmarks.split_model.undivided import UndividedDecoder
from crosspool.backends.cuda.device.launch import DeviceKernels, Launcher
from crosspool.backends.cuda.kernels.norm import residual_norm
from crosspool.backends.cuda.kv_rank.attention_half import AttentionHalf
from crosspool.backends.cuda.loading.weights import pack_attention_weights, pack_ffn_weights, random_layers
from crosspool.backends.cuda.weights_rank.ffn_half import FFNHalf
from crosspool.kv_pool.geometry import page_geometry
from crosspool.models.families.registry import FAMILIES
from crosspool.models.spec import ModelSpec, MoEFFNSpec
from crosspool.models.tensors import Pool, TensorSpec, model_tensors
from crosspool.units import MiB

ROWS, STEPS = 16, 32
LAYER_LIMIT = 1e-2
LOGITS_RATIO_LIMIT = 1.25
DECIDED_LIMIT = 0.25
TIE = 0.03
"""Router logits (unit variance) closer than this are a tie: transformers rounds them, or their input, to bf16."""
SEED = 11

Canonical = dict[int | None, Mapping[str, torch.Tensor]]


class Float32Layer(torch.nn.Module):  # type: ignore[misc]
    """A decoder layer that computes in fp32 on a copy that lives for one call."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self._layer = [layer]  # in a list: its parameters stay out of this module's

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return copy.deepcopy(self._layer[0]).float()(*args, **kwargs)


@dataclass
class Reference:
    """What transformers gives for `token_ids` (rows, steps)."""

    token_ids: torch.Tensor
    inputs: list[torch.Tensor] = field(default_factory=list)  # of each layer, (rows, steps, hidden)
    outputs: list[torch.Tensor] = field(default_factory=list)
    experts: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> (rows, steps, top_k)
    logits: torch.Tensor | None = None
    logits_fp32: torch.Tensor | None = None


def hf_model(config: Mapping[str, Any], spec: ModelSpec, tensors: Canonical, device: torch.device) -> Any:
    """The transformers model over the same storage as `tensors`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in config.items() if name not in ("model_type", "torch_dtype")}
    hf_config = AutoConfig.for_model(config["model_type"], **fields)
    hf_config._attn_implementation = "eager"
    hf_config._experts_implementation = "eager"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16)
    missing, unexpected = model.load_state_dict(
        dict(hf_state(config["model_type"], spec, tensors)), strict=False, assign=True
    )
    if missing or unexpected:
        raise RuntimeError(f"transformers' weights do not match: missing {missing[:4]}, unexpected {unexpected[:4]}")
    with device:
        model.model.rotary_emb = type(model.model.rotary_emb)(config=hf_config)
    return model.eval().requires_grad_(False)


def hf_state(family_name: str, spec: ModelSpec, tensors: Canonical) -> Iterator[tuple[str, torch.Tensor]]:
    family = FAMILIES[family_name]
    for tensor in model_tensors(spec):
        value = tensors[tensor.layer][tensor.name]
        names = fused_names(family.sources(tensor, present_names(tensor)))
        if len(names) != 1:
            raise RuntimeError(f"{tensor.name} of {family_name} is stored in {len(names)} tensors; one was expected")
        name = names[0]
        if tensor.name == "router" and family_name == "qwen3_moe":
            value = value.bfloat16()  # drawn in bf16: no rounding
        yield name, value


def present_names(tensor: TensorSpec) -> set[str]:
    prefix = f"model.layers.{tensor.layer}.mlp.experts."
    return {prefix + "gate_up_proj", prefix + "down_proj"}


def fused_names(sources: Iterator[Any]) -> list[str]:
    return [source.name for source in sources]


def run_reference(model: Any, token_ids: torch.Tensor) -> Reference:
    reference = Reference(token_ids)
    rows, steps = token_ids.shape
    handles = []
    for idx, layer in enumerate(model.model.layers):

        def keep(_module: Any, args: Any, kwargs: Any, output: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            reference.inputs.append(hidden.clone())
            reference.outputs.append((output[0] if isinstance(output, tuple) else output).clone())

        handles.append(layer.register_forward_hook(keep, with_kwargs=True))
        gate = getattr(layer.mlp, "gate", None)
        if gate is not None:

            def keep_experts(_module: Any, _args: Any, output: Any, idx: int = idx) -> None:
                reference.experts[idx] = output[-1].view(rows, steps, -1).clone()

            handles.append(gate.register_forward_hook(keep_experts))
    reference.logits = model(input_ids=token_ids, use_cache=False).logits
    for handle in handles:
        handle.remove()
    layers = model.model.layers
    norm = model.model.norm
    model.model.layers = torch.nn.ModuleList(Float32Layer(layer) for layer in layers)
    model.model.norm = copy.deepcopy(norm).float()
    embedded = model.model.embed_tokens(token_ids).float()
    hidden = model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
    reference.logits_fp32 = hidden.float() @ model.lm_head.weight.float().T
    model.model.layers, model.model.norm = layers, norm
    return reference


def set_position(half: AttentionHalf, token_ids: torch.Tensor, position: int) -> None:
    half.token_ids.copy_(token_ids[:, position])
    half.positions.fill_(position)
    half.lengths.fill_(position + 1)


def layer_errors(
    kernels: Launcher, half: AttentionHalf, ffn: FFNHalf, reference: Reference
) -> tuple[list[float], list[float], int, float]:
    """Each layer alone on the reference's input: relative error of its output and of what it adds, expert
    differences that are no ties, and the largest distance among all differences."""
    num_layers = half.spec.num_layers
    weights = half._weights
    outputs = [torch.empty_like(reference.outputs[0], dtype=torch.float32) for _ in range(num_layers)]
    partial = torch.empty_like(half.residual)
    wrong, widest = 0, 0.0
    for position in range(reference.token_ids.shape[1]):
        set_position(half, reference.token_ids, position)
        half.embed()  # angles of the position
        for layer in range(num_layers):
            half.residual.copy_(reference.inputs[layer][:, position])
            norm = weights.layers[layer].input_norm
            residual_norm(kernels, half.residual, norm, half.normed, eps=half.spec.norm_eps, overlap=False)
            rows = half.attend(layer)
            ffn.run(layer, rows, partial)
            half.add(layer, [partial])
            outputs[layer][:, position] = half.residual
            spec = half.spec.layers[layer].ffn
            if isinstance(spec, MoEFFNSpec):
                distances = expert_distances(ffn, spec, layer, reference.experts[layer][:, position])
                wrong += sum(distance > TIE for distance in distances)
                widest = max([widest, *distances])
    out_errors, delta_errors = [], []
    for layer in range(num_layers):
        expected, given = reference.outputs[layer].float(), reference.inputs[layer].float()
        error = (outputs[layer] - expected).norm()
        out_errors.append((error / expected.norm()).item())
        delta_errors.append((error / (expected - given).norm()).item())
    return out_errors, delta_errors, wrong, widest


def expert_distances(ffn: FFNHalf, spec: MoEFFNSpec, layer: int, expected: torch.Tensor) -> list[float]:
    """For each row whose experts differ: how far the choice scores of the differing experts lie apart."""
    routing, router = ffn.scratch.routing, ffn.layers[layer].router
    assert router is not None
    rows = len(expected)
    ids = routing.topk_ids[: rows * spec.top_k].view(rows, spec.top_k).long()
    same = (ids.sort(-1).values == expected.long().sort(-1).values).all(-1)
    if bool(same.all()):
        return []
    logits = routing.logits[: rows * router.weight.shape[0]].view(rows, -1)[:, : spec.num_experts]
    if router.choice_bias is not None:
        logits = logits.sigmoid() + router.choice_bias
    distances = []
    for row in (~same).nonzero().flatten().tolist():
        ours, theirs = set(ids[row].tolist()), set(expected[row].tolist())
        values = [logits[row, expert].item() for expert in ours ^ theirs]
        distances.append(max(values) - min(values))
    return distances


def decode_logits(decoder: UndividedDecoder, token_ids: torch.Tensor) -> torch.Tensor:
    """(rows, steps, vocabulary) fp32, token by token."""
    steps = []
    for position in range(token_ids.shape[1]):
        set_position(decoder.attention, token_ids, position)
        steps.append(decoder.step().clone())
    return torch.stack(steps, dim=1)


def compare(
    report: Report, kernels: Launcher, name: str, config: Mapping[str, Any], spec: ModelSpec, device: torch.device
) -> None:
    tensors: Canonical = {}
    pools: tuple[Pool, ...] = ("kv", "weights")
    for pool in pools:
        for layer, members in random_layers(spec, pool, SEED, device):
            tensors[layer] = {**tensors.get(layer, {}), **members}
    layers = [tensors[idx] for idx in range(spec.num_layers)]
    attention = pack_attention_weights(spec, tensors[None], iter(layers))
    ffn = FFNHalf(kernels, pack_ffn_weights(spec, iter(layers)), ROWS)
    geometry = page_geometry(spec, page_tokens=16, frame_bytes=2 * MiB)
    half = AttentionHalf(
        kernels,
        spec,
        attention,
        seeded_cache(geometry, ROWS, STEPS, device=device),
        ROWS,
        one_row_per_sequence=True,
    )
    generator = torch.Generator(device=device).manual_seed(SEED)
    token_ids = torch.randint(1, spec.vocab_size, (ROWS, STEPS), device=device, generator=generator)
    model = hf_model(config, spec, tensors, device)
    reference = run_reference(model, token_ids)
    out_errors, delta_errors, wrong, widest = layer_errors(kernels, half, ffn, reference)
    ours = decode_logits(UndividedDecoder(half, [ffn]), token_ids).flatten(0, 1)
    assert reference.logits is not None
    assert reference.logits_fp32 is not None
    theirs, exact = reference.logits.flatten(0, 1).float(), reference.logits_fp32.flatten(0, 1)
    report.metric(f"equality_layer_error.{name}", max(out_errors), limit=LAYER_LIMIT, note="worst layer, whole output")
    report.metric(f"equality_layer_delta_error.{name}", max(delta_errors), note="worst layer, what it adds")
    report.metric(f"equality_wrong_experts.{name}", wrong, limit=0, note="rows x layers, ties left out")
    report.metric(f"equality_expert_gap.{name}", widest, limit=TIE, note="widest choice-score gap of any difference")
    ratio = ((ours - exact).norm() / (theirs - exact).norm()).item()
    report.metric(
        f"equality_logits_ratio.{name}", ratio, limit=LOGITS_RATIO_LIMIT, note="ours to fp32 / theirs to fp32"
    )
    by_position = (ours - exact).norm(dim=-1).median() / (theirs - exact).norm(dim=-1).median()
    report.metric(f"equality_logits_ratio_median.{name}", by_position.item(), limit=LOGITS_RATIO_LIMIT)
    report.metric(f"equality_logits_error.{name}", ((ours - exact).norm() / exact.norm()).item())
    top = exact.topk(2, dim=-1)
    margin = top.values[:, 0] - top.values[:, 1]
    for label, bound in (("", (theirs - exact).abs().amax(-1)), (".own", (ours - theirs).abs().amax(-1))):
        decided = margin > 2 * bound
        agree = ours.argmax(-1)[decided] == top.indices[:, 0][decided]
        report.metric(f"equality_top1_decided.{name}.1+1{label}", decided.float().mean().item(), limit=DECIDED_LIMIT)
        report.metric(f"equality_top1_wrong.{name}{label}", int((~agree).sum()), limit=0)
    report.metric(f"equality_top1_same.{name}", (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item())
    wrong_rows = relative(ours.roll(1, 0), exact)
    report.metric(f"equality_negative_control.{name}", wrong_rows, note="logits of the wrong positions; must be large")
    for metric, value in report.metrics.items():
        if f".{name}" in metric:
            print(f"{metric}: {value:.5g} (limit {report.limits.get(metric)})", flush=True)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--models", default=",".join(CONFIGS))
    options = parser.parse_args()
    device = torch.device("cuda")
    kernels = DeviceKernels(device)
    torch.set_grad_enabled(False)
    failures: dict[str, str] = {}
    report = Report("equality", hardware="h200", config={"rows": ROWS, "steps": STEPS, "dtype": "bf16"}, seed=SEED)
    report.summary = "Full-size random weights, the same storage on both sides; decode kernels against transformers."
    for name in options.models.split(","):
        guarded(
            name,
            lambda name=name: compare(report, kernels, name, CONFIGS[name], full_spec(name), device),  # type: ignore[misc]
            failures,
        )
        torch.cuda.empty_cache()
    report.write(options.out)
    write_failures(failures, options.out)


if __name__ == "__main__":
    main()
