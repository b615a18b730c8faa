"""Host memory in groups, and whole models in it: the same bytes wherever they lie."""

from __future__ import annotations

import errno
import mmap

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.channels.link import Site  # noqa: E402
from crosspool.backends.cuda.device.driver import CudaError, Driver  # noqa: E402
from crosspool.backends.cuda.loading.streaming import stream_share  # noqa: E402
from crosspool.backends.cuda.loading.weights import (  # noqa: E402
    mapped,
    pack_attention_weights,
    pack_ffn_weights,
)
from crosspool.backends.cuda.prefill_rank import host_model  # noqa: E402
from crosspool.backends.cuda.prefill_rank.host_blob import HUGE_PAGE_BYTES, HostBlob  # noqa: E402
from crosspool.backends.cuda.prefill_rank.host_model import OWN, load_whole  # noqa: E402
from crosspool.backends.cuda.prefill_rank.places import Place  # noqa: E402
from crosspool.backends.cuda.prefill_rank.swap import Swapper  # noqa: E402
from crosspool.cluster.base import ModelPlacement  # noqa: E402
from crosspool.models.directory import ModelDirectory, read_model_dir  # noqa: E402
from crosspool.models.whole_size import whole_bytes  # noqa: E402
from tests.support.tiny_models import write_tiny_model  # noqa: E402

pytestmark = pytest.mark.judge

CPU = torch.device("cpu")
SITE = Site("p0", CPU, Driver("p0"), {"p0": 0}, None)


def placement_of(directory: ModelDirectory) -> ModelPlacement:
    return ModelPlacement(
        name="m",
        directory=directory.path,
        hidden_size=directory.spec.hidden_size,
        kv_rank="kv0",
        weights_ranks=("w0", "w1"),
        prefill_ranks=("p0",),
        page_tokens=8,
        frame_bytes=2**16,
        kv_dtype="bfloat16",
    )


def tensors_of(weights: object) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    mapped(weights, lambda tensor: found.append(tensor) or tensor)
    return found


def nothing(loaded: int, total: int) -> None: ...


def test_a_kernel_without_huge_pages_has_memory_too(monkeypatch):
    class WithoutHugePages(mmap.mmap):
        def madvise(self, *advice):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", WithoutHugePages)
    assert HostBlob(SITE, {"a": 100}).num_bytes == HUGE_PAGE_BYTES


def test_groups_begin_at_huge_pages_and_tensors_lie_in_them_in_turn():
    blob = HostBlob(SITE, {"a": 100, "b": HUGE_PAGE_BYTES + 1})
    assert [(group.start, group.stop) for group in blob.groups.values()] == [
        (0, HUGE_PAGE_BYTES),
        (HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES),
    ]
    assert blob.memory.data_ptr() % HUGE_PAGE_BYTES == 0
    first, second = (blob.put("b", (3, 5), torch.bfloat16) for _ in range(2))
    assert (blob.offset(first), blob.offset(second)) == (HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 256)
    assert not first.any()
    first.fill_(1)
    assert blob.memory[HUGE_PAGE_BYTES : HUGE_PAGE_BYTES + 30].any()
    assert blob.offset(torch.zeros(3)) is None
    with pytest.raises(ValueError, match=r"group a of .* has no room for 2097408 bytes"):
        blob.put("a", (HUGE_PAGE_BYTES + 256,), torch.uint8)


def test_a_host_that_cannot_pin_so_much_is_told_with_rank_model_and_size(tmp_path, monkeypatch):
    def refused(*sizes):
        raise CudaError("p0: cuMemHostRegister failed: CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(host_model, "HostBlob", refused)
    directory = read_model_dir(write_tiny_model(tmp_path / "tiny", "qwen3_moe", dtype="bfloat16", tokenizer=False))
    with pytest.raises(
        ValueError, match=r"p0: the host has no room to pin 0\.0 GiB for m \(p0: cuMemHostRegister .*; free"
    ):
        load_whole(directory, placement_of(directory), SITE, nothing)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss", "qwen2_moe", "llama"])
def test_a_whole_model_is_both_pools_weights_and_comes_to_a_place_as_it_is(family, tmp_path):
    directory = read_model_dir(write_tiny_model(tmp_path / family, family, dtype="bfloat16", tokenizer=False))
    spec = directory.spec
    told = []
    host = load_whole(directory, placement_of(directory), SITE, lambda loaded, total: told.append((loaded, total)))
    assert told[-1][0] == told[-1][1]
    own, layers = stream_share(directory, "kv", CPU, nothing)
    attention = pack_attention_weights(spec, own, iter(layers))
    ffn = pack_ffn_weights(spec, iter(stream_share(directory, "weights", CPU, nothing)[1]))
    place = Place(torch.full((host.num_bytes,), 7, dtype=torch.uint8))
    for weights in (host.weights, Swapper(CPU).bring(host, place).weights):
        assert torch.equal(weights.embed, attention.embed)
        assert torch.equal(weights.final_norm, attention.final_norm)
        for number, layer in enumerate(weights.layers):
            for found, wanted in ((layer.attention, attention.layers[number]), (layer.ffn, ffn[number])):
                pairs = list(zip(tensors_of(found), tensors_of(wanted), strict=True))
                assert pairs
                assert all(torch.equal(one, other) for one, other in pairs)
    groups = host.blob.groups
    assert host.num_bytes == whole_bytes(spec)
    assert list(groups) == [OWN, *range(spec.num_layers)]
    for number, layer in enumerate(host.weights.layers):
        for tensor in tensors_of(layer):
            group = groups[OWN if tensor is layer.attention.input_norm else number]
            assert group.start <= host.blob.offset(tensor) < group.stop
