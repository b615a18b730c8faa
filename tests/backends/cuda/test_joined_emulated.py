"""Models whose halves share a process and a GPU: no channel, and the tokens of the two pools."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from crosspool.backends.base import NewLink  # noqa: E402
from crosspool.backends.cuda.chunks import chunk_plan, chunk_run  # noqa: E402
from crosspool.backends.cuda.joined import JoinedLink, await_ffn  # noqa: E402
from crosspool.backends.cuda.kv_rank.kv_worker import CudaAttentionWorker  # noqa: E402
from crosspool.backends.cuda.steps.lane_memory import WaitRule  # noqa: E402
from crosspool.backends.cuda.weights_rank.ffn_worker import CudaFFNWorker  # noqa: E402
from crosspool.backends.cuda.weights_rank.patience import Patience  # noqa: E402
from crosspool.backends.cuda.workers import join_halves  # noqa: E402
from crosspool.models.directory import read_model_dir  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402
from tests.backends.cuda.worker_pair import (  # noqa: E402
    NUM_FRAMES,
    Pair,
    arena,
    decode_step,
    generate,
    greedy,
    prefill_step,
    prompt_of,
    site,
)
from tests.support.tiny_models import write_tiny_model  # noqa: E402

pytestmark = [pytest.mark.judge, pytest.mark.triton]


class JoinedPair(Pair):
    """A KV worker and the FFN worker beside it; `first_frame` as the second of two KV ranks has it."""

    def __init__(self, directory, first_frame=None) -> None:
        super().__init__(directory)
        devices, rule = {"kv0": 0, "w0": 0}, WaitRule()
        self.kernels = EmulatedKernels()
        self.kv = CudaAttentionWorker(site("kv0", devices), self.kernels, rule, arena(), first_frame=first_frame)
        self.ffn = {"w0": CudaFFNWorker(site("w0", devices), self.kernels, rule, order="ticket")}
        join_halves(self.kv, self.ffn["w0"], "kv0", "w0")
        region = memoryview(bytearray(64))
        self.outlets["w0"], self.inlets["w0"] = self.kv.open_link(NewLink(0, "w0", region, 1 << 30, lambda: None))
        self.ends["w0"] = self.ffn["w0"].open_link(NewLink(0, "kv0", region, 1 << 30, lambda: None))
        for worker in (self.ffn["w0"], self.kv):
            worker.add_model(self.placement, lambda loaded, total: None)


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v2"])
def directory(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "tiny"
    return read_model_dir(write_tiny_model(path, request.param, dtype="bfloat16", tokenizer=False))


def test_a_joined_model_gives_the_tokens_of_two_pools(directory):
    prompt = prompt_of(directory, 9)
    pair = JoinedPair(directory)
    assert generate(pair, directory, prompt, 5, greedy()) == generate(Pair(directory), directory, prompt, 5, greedy())
    crossings = {"norm_put", "wait_norm", "cross"}
    assert not crossings & {kernel for kernel, _, _ in pair.kernels.launches}
    assert pair.kv.memory_bytes()["channels"] == 0


def test_a_joined_chunk_in_pieces_gives_the_tokens_of_two_pools(directory, monkeypatch):
    monkeypatch.setattr(chunk_plan, "PIECE_TOKENS", 16)
    prompt = prompt_of(directory, 44)
    found = []
    for pair in (Pair(directory), JoinedPair(directory)):
        (first,) = pair.run(prefill_step(directory, prompt, 1, greedy()))
        (second,) = pair.run(decode_step({1: 44}, 2))
        found.append([first.token_id, second.token_id])
    assert found[0] == found[1]


class CountedPatience(Patience):
    """Notes the tokens of every piece that is timed."""

    def __init__(self) -> None:
        super().__init__(None)
        self.timed_tokens: list[int] = []

    def timed(self, num_tokens):
        self.timed_tokens.append(num_tokens)
        return super().timed(num_tokens)


def test_pieces_of_a_joined_chunk_step_aside_as_long_as_those_of_a_weights_rank(directory, monkeypatch):
    """Every piece's FFN is timed, and the stream of the next piece is asked of the same patience."""
    monkeypatch.setattr(chunk_plan, "PIECE_TOKENS", 16)
    pair = JoinedPair(directory)
    assert not pair.ffn["w0"].patience.is_out, "prompts step aside whatever the order of segments"
    patience = pair.ffn["w0"]._patience = CountedPatience()
    asked, stream = [], chunk_run._stream
    monkeypatch.setattr(chunk_run, "_stream", lambda *asking: asked.append(asking[2]) or stream(*asking))
    pair.run(prefill_step(directory, prompt_of(directory, 44), 1, greedy()))
    num_layers = directory.spec.num_layers
    assert len(patience.timed_tokens) == 3 * num_layers
    assert sum(patience.timed_tokens) == 44 * num_layers
    assert asked.count(patience) >= 3 * num_layers


def test_frames_are_numbered_over_all_kv_ranks(directory):
    prompt = prompt_of(directory, 9)
    pair = JoinedPair(directory, first_frame=NUM_FRAMES)
    with pytest.raises(ValueError, match="from 65 on"):
        pair.run(prefill_step(directory, prompt, 1, greedy()))
    (found,) = pair.run(prefill_step(directory, prompt, 2, greedy(), first_frame=NUM_FRAMES + 1))
    (expected,) = JoinedPair(directory).run(prefill_step(directory, prompt, 1, greedy()))
    assert found.token_id == expected.token_id


def test_a_load_ends_where_the_ffn_beside_it_does_not_come(directory):
    pair = JoinedPair(directory)
    looks = []
    with pytest.raises(RuntimeError, match="given up"):
        await_ffn(pair.ffn["w0"], "another", lambda: looks.append(1) or give_up(len(looks)), lambda seconds: None)
    assert len(looks) == 3
    await_ffn(pair.ffn["w0"], "tiny", lambda: pytest.fail("it is there"))


def give_up(num_looks):
    if num_looks == 3:
        raise RuntimeError("given up")


def test_a_joined_link_has_no_channel():
    link = JoinedLink()
    assert link.is_open()
    with pytest.raises(TypeError, match="no channels"):
        link.map()
