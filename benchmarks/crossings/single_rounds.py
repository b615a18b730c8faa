"""Single rounds of the FFN's kernels at small shapes, one after another, for a tool that watches shared memory.

    compute-sanitizer --tool racecheck python -m benchmarks.crossings.single_rounds

Every round of the resident server is compared with the launched kernels, bit for bit. Nothing waits for a peer, whose
sums would hold two layers apart: so each round is a pass of one layer.
"""

from __future__ import annotations

import torch

from benchmarks.full_models import CONFIGS
from benchmarks.split_model.model import Side, open_links
from crosspool.backends.cuda.channels.channel_map import LinkMap
from crosspool.backends.cuda.channels.transport import FFNCrossing
from crosspool.backends.cuda.device.launch import DeviceKernels
from crosspool.backends.cuda.kernels.moe import ffn
from crosspool.backends.cuda.kernels.moe_params import FFNScratch
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.loading.weights import random_ffn_weights
from crosspool.backends.cuda.steps.lane_memory import WaitRule
from crosspool.backends.cuda.weights_rank.ffn_server import FFNServer, serve_layers
from crosspool.models.families.registry import spec_from_config
from crosspool.models.spec import ModelSpec

SMALL = {
    "qwen3-30b-a3b": {"hidden_size": 512, "moe_intermediate_size": 192, "num_experts": 32},
    "deepseek-v2-lite": {"hidden_size": 512, "moe_intermediate_size": 176, "n_routed_experts": 32},
}
"""What differs from the full-size configs: every kernel's ways are taken, at a hundredth of the bytes."""
BATCHES = (1, 3, 8, 17)
SEED = 11


def small_spec(name: str, num_layers: int) -> ModelSpec:
    """The model's last `num_layers` layers, small."""
    spec = spec_from_config({**CONFIGS[name], **SMALL[name], "num_hidden_layers": num_layers + 1})
    return ModelSpec(**{**vars(spec), "layers": spec.layers[-num_layers:]})


def served(kernels: DeviceKernels, layer: FFNLayerWeights, x: torch.Tensor) -> torch.Tensor:
    """The sums that a pass of the server leaves for the layer, which is sent `x`."""
    batch, hidden = x.shape
    links, kept = open_links(kernels.device, [kernels.device], (2 * batch + 32) * hidden)
    link = links[0]
    side = Side.on(kernels, WaitRule(deadline_s=None))
    crossing = FFNCrossing(kernels, side.lane, LinkMap(link.outbox, link.inbox))
    scratch = FFNScratch.for_layers([layer], batch, kernels.device)
    copy(link.outbox.slot(0), x.data_ptr(), x.nbytes)
    server = FFNServer(kernels, kernels.device, [side.lane])
    server.post(side.lane, serve_layers([layer], crossing, batch, scratch), 7 * 1024)
    server.stop()
    is_words = link.inbox.fits_words(batch, hidden)
    out = torch.empty(batch, hidden, 1 + is_words, dtype=torch.float32, device=x.device)
    source = link.inbox.words(0, batch, hidden).address if is_words else link.inbox.slot(0)
    copy(out.data_ptr(), source, out.nbytes)
    del kept
    return out[..., 0].clone()


def copy(to: int, source: int, num_bytes: int) -> None:
    """Between two places of one device."""
    from cuda.bindings import driver

    (status,) = driver.cuMemcpyDtoD(to, source, num_bytes)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuMemcpyDtoD of {num_bytes} bytes failed: {status}")


def main() -> None:
    kernels = DeviceKernels(torch.device("cuda"))
    for name in SMALL:
        layers = random_ffn_weights(small_spec(name, 2), SEED, kernels.device)
        for batch in BATCHES:
            torch.manual_seed(SEED + batch)
            x = torch.randn(batch, layers[0].hidden, device="cuda").bfloat16()
            for layer in layers:
                from_server = served(kernels, layer, x)
                scratch = FFNScratch.for_layers(list(layers), batch, kernels.device)
                outs = [torch.full_like(from_server, float("nan")) for _ in range(2)]
                for out, fused in zip(outs, (False, True), strict=True):
                    ffn(kernels, layer, x, out, scratch, fused=fused)
                torch.cuda.synchronize()
                assert torch.equal(outs[0], outs[1]), f"{name}, batch {batch}: one kernel differs from three"
                assert torch.equal(outs[0], from_server), f"{name}, batch {batch}: the server differs"
            print(f"{name}, batch {batch}: {len(layers)} layers by server, one kernel and three, equal", flush=True)


if __name__ == "__main__":
    main()
