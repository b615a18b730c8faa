"""Epochs and numbers of meetings where their low halves come round: words carry no more than those."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from crosspool.backends.cuda.kernels.moe import ffn  # noqa: E402
from crosspool.backends.cuda.kernels.moe_params import FFNScratch  # noqa: E402
from crosspool.backends.cuda.weights_rank.ffn_server import FFNServer  # noqa: E402
from crosspool.models.directory import read_model_dir  # noqa: E402
from crosspool.scheduler.step import LAYERS_PER_STEP  # noqa: E402
from tests.backends.cuda.decoding import build_decoder, decode_prompts  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402
from tests.backends.cuda.split_pass import SplitPass  # noqa: E402
from tests.backends.cuda.test_ffn_server_emulated import Lane, layers_of  # noqa: E402
from tests.support.tiny_models import write_tiny_model  # noqa: E402

pytestmark = pytest.mark.judge

CPU = torch.device("cpu")
NUM_SMS = 3
ROUND = 2**32
BEFORE_ROUND = ROUND // LAYERS_PER_STEP - 1
"""The last step whose epochs have a low half below the next one's."""


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("meetings", [ROUND // 2 - 1, ROUND - 1])
def test_a_fused_layer_goes_on_where_its_meetings_come_round(rows, meetings, tmp_path):
    """Its buffers are new and hold zeros, which no meeting's number is."""
    (layer, _) = layers_of("qwen3_moe", tmp_path, 2)
    x = torch.randn(rows, layer.hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected, found = (torch.empty(rows, layer.hidden) for _ in range(2))
    kernels = EmulatedKernels(num_sms=NUM_SMS)
    ffn(kernels, layer, x, expected, FFNScratch.for_layers([layer], rows, CPU))
    scratch = FFNScratch.for_layers([layer], rows, CPU)
    scratch.routing.meetings.fill_(meetings * NUM_SMS)
    for _ in range(3):
        ffn(kernels, layer, x, found.fill_(float("nan")), scratch, fused=True)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("sums_by", ["words", "flags"])
def test_steps_go_on_where_the_low_half_of_epochs_comes_round(sums_by, tmp_path):
    directory = read_model_dir(write_tiny_model(tmp_path / "m", "qwen3_moe", dtype="bfloat16", tokenizer=False))
    prompts = np.random.default_rng(3).integers(1, directory.spec.vocab_size, size=(2, 3)).tolist()
    _, expected = decode_prompts(build_decoder(EmulatedKernels(), directory, 2, 6, CPU), prompts)
    parts = build_decoder(EmulatedKernels(), directory, 2, 6, CPU)
    split = SplitPass(EmulatedKernels(), parts.attention, parts._slices, sums_by=sums_by)
    for position, logits in enumerate(expected):
        base = (BEFORE_ROUND + position) * LAYERS_PER_STEP
        split.push(base, [prompt[position] for prompt in prompts], [position, position])
        split.run()
        assert torch.equal(split.half.logits_out, logits)
        assert [lane.done_epoch - base for lane in (split.lane, *split.ffn_lanes)] == [directory.spec.num_layers] * 2
    assert split.lane.late_epoch(0) == split.ffn_lanes[0].late_epoch(0) == 0


def test_sums_of_a_server_carry_the_low_half_of_their_epochs(tmp_path):
    lane = Lane(layers_of("qwen3_moe", tmp_path), 2, words=True)
    server = FFNServer(EmulatedKernels(num_sms=NUM_SMS), CPU, [lane.memory], idle_s=0.0)
    for step in (BEFORE_ROUND, BEFORE_ROUND + 1):
        base = step * LAYERS_PER_STEP
        lane.raise_flag(base + 3)
        server.post(lane.memory, lane.served, base)
        assert [lane.epochs(layer) for layer in (1, 2)] == [{(base + 2) % ROUND}, {(base + 3) % ROUND}]
        lane.check(2)
