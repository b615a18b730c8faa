"""Crossings and passes on the CPU: the kernels' own source, split execution against the undivided model."""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.channels.channel_map import LinkMap  # noqa: E402
from crosspool.backends.cuda.channels.transport import (  # noqa: E402
    AttentionCrossing,
    FFNCrossing,
    begin_pass,
    end_pass,
)
from crosspool.backends.cuda.steps.lane_memory import LaneMemory, WaitRule  # noqa: E402
from crosspool.backends.cuda.steps.records import RING_SLOTS  # noqa: E402
from crosspool.models.directory import read_model_dir  # noqa: E402
from tests.backends.cuda.decoding import build_decoder, decode_prompts  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402
from tests.backends.cuda.split_pass import OwnedChannel, SplitPass  # noqa: E402
from tests.support.tiny_models import write_tiny_model  # noqa: E402

pytestmark = pytest.mark.judge

CPU = torch.device("cpu")
HIDDEN = 64


def epoch_base(step: int) -> int:
    return 1024 * step


@pytest.mark.parametrize(
    ("family", "num_slices", "fused", "sums_by", "route"),
    [
        ("qwen3_moe", 1, False, "flags", "ffn"),
        ("deepseek_v2", 2, False, "flags", "kv"),
        ("qwen3_moe", 2, False, "words", "ffn"),
        ("deepseek_v2", 3, True, "words", "ffn"),
        ("qwen3_moe", 1, True, "flags", "kv"),
        ("qwen2_moe", 2, True, "words", "kv"),
        ("gpt_oss", 1, False, "words", "kv"),
    ],
)
def test_split_passes_equal_the_undivided_model_bit_for_bit(family, num_slices, fused, sums_by, route, tmp_path):
    directory = read_model_dir(write_tiny_model(tmp_path / "m", family, dtype="bfloat16", tokenizer=False))
    prompts = np.random.default_rng(3).integers(1, directory.spec.vocab_size, size=(2, 6)).tolist()
    kernels = EmulatedKernels()
    whole = build_decoder(EmulatedKernels(), directory, 2, 6, CPU, num_slices=num_slices)
    parts = build_decoder(kernels, directory, 2, 6, CPU, num_slices=num_slices, fused=fused)
    _, expected = decode_prompts(whole, prompts)
    routers = None
    if route == "kv":
        routers = [layer.router for layer in parts._slices[0].layers]
        for part in parts._slices:
            part.layers = tuple(replace(layer, router=None) for layer in part.layers)
    split = SplitPass(EmulatedKernels(), parts.attention, parts._slices, sums_by=sums_by, routers=routers)
    for position, logits in enumerate(expected):
        base = epoch_base(position + 1)
        slot = split.push(base, [prompt[position] for prompt in prompts], [position, position])
        split.run()
        assert torch.equal(split.half.logits_out, logits)
        assert split.lane.done_epoch == base + directory.spec.num_layers
        assert [lane.done_epoch for lane in split.ffn_lanes] == [split.lane.done_epoch] * num_slices
        assert split.lane.tokens(slot, 2) == logits.argmax(-1).tolist()
    assert split.lane.late_epoch(0) == 0
    assert any(kernel.startswith("moe_fused") for kernel, _, _ in kernels.launches) == fused


def test_a_pass_may_take_the_tokens_of_the_one_before_it(tmp_path):
    directory = read_model_dir(write_tiny_model(tmp_path / "m", "qwen3_moe", dtype="bfloat16", tokenizer=False))
    decoders = [build_decoder(EmulatedKernels(), directory, 2, 4, CPU) for _ in range(2)]
    told, fed = (SplitPass(EmulatedKernels(), d.attention, d._slices) for d in decoders)
    ids = [5, 9]
    for position in range(3):
        slot = told.push(epoch_base(position + 1), ids, [position] * 2)
        fed.push(epoch_base(position + 1), ids if position == 0 else [-1, -2], [position] * 2)
        told.run()
        fed.run()
        ids = told.lane.tokens(slot, 2)
    assert torch.equal(told.half.logits_out, fed.half.logits_out)


def sides(rule: WaitRule, *, takes_words: bool = False):
    """A lane of each rank and its link, as the KV rank and the weights rank see it."""
    kernels = EmulatedKernels()
    into, out = (OwnedChannel((36 if takes_words else 2) * HIDDEN, CPU) for _ in range(2))
    kv, ffn = LaneMemory(CPU, rule), LaneMemory(CPU, rule)
    attention = AttentionCrossing(kernels, kv, [LinkMap(into.map, out.map)], takes_words=takes_words)
    crossing = FFNCrossing(kernels, ffn, LinkMap(out.map, into.map))
    for lane in (kv, ffn):
        lane.push(epoch_base(1), 1)
        begin_pass(kernels, lane)
    return kernels, kv, ffn, attention, crossing, (into, out)


def norm_arguments():
    generator = torch.Generator().manual_seed(0)
    residual = torch.randn(2, HIDDEN, generator=generator)
    return residual, torch.ones(HIDDEN, dtype=torch.bfloat16), torch.empty(2, HIDDEN, dtype=torch.bfloat16)


def test_rows_arrive_before_their_flag():
    _kernels, _kv, _ffn, attention, crossing, channels = sides(WaitRule())
    residual, weight, normed = norm_arguments()
    attention.norm_put(0, residual, weight, normed, 1e-6)
    crossing.wait(0)
    rows = crossing.rows(0, 2, HIDDEN)
    got = (ctypes.c_char * (2 * HIDDEN * 2)).from_address(rows.address).raw
    assert got == normed.view(torch.int16).numpy().tobytes()
    expected = residual / torch.sqrt((residual**2).mean(-1, keepdim=True) + 1e-6)
    assert torch.allclose(normed.float(), expected, atol=2e-2)
    assert ctypes.c_uint64.from_address(channels[1].map.flag).value == epoch_base(1) + 1


def test_a_wait_past_its_deadline_names_the_peer_and_lets_the_step_run_on():
    kernels, kv, _ffn, attention, _crossing, _channels = sides(WaitRule(deadline_s=0.5))
    begin = time.monotonic()
    for layer in range(60):  # only the first of a step's waits takes its time
        attention.wait_norm(layer, *norm_arguments(), 1e-6)
    assert 0.5 <= time.monotonic() - begin < 15.0
    end_pass(kernels, kv, 1)
    assert kv.done_epoch == epoch_base(1) + 1
    assert kv.late_epoch(0) >= epoch_base(1) + 1
    kv.push(epoch_base(2), 1)  # the next step waits anew
    begin_pass(kernels, kv)
    begin = time.monotonic()
    attention.wait_norm(0, *norm_arguments(), 1e-6)
    assert time.monotonic() - begin >= 0.5


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_peer_is_not_told_of_what_is_void(is_given_up):
    """It may be the one whose word ends the step, and only have been slow."""
    _kernels, _kv, ffn, _attention, crossing, channels = sides(WaitRule(deadline_s=0.05))
    if is_given_up:
        ffn.abort(epoch_base(1))
    crossing.wait(0)
    crossing.signal(0)
    answered = ctypes.c_uint64.from_address(channels[0].map.flag)
    assert answered.value == 0
    assert ffn.late_epoch(0) == epoch_base(1) + 1
    ffn.push(epoch_base(2), 1)
    begin_pass(EmulatedKernels(), ffn)
    ctypes.c_uint64.from_address(channels[1].map.flag).value = epoch_base(2) + 1
    crossing.wait(0)
    crossing.signal(0)
    assert answered.value == epoch_base(2) + 1


def test_kernels_behind_a_wait_begin_once_every_thread_has_its_words():
    """They would take the multiprocessors that a weights rank of the same GPU needs for the rest."""
    kernels, kv, _ffn, attention, _crossing, channels = sides(WaitRule(deadline_s=0.1), takes_words=True)
    assert channels[0].map.fits_words(2, HIDDEN)
    kernels.looks_after_release("transport")
    attention.wait_norm(0, *norm_arguments(), 1e-6)
    assert kernels.looks_after_release("transport") == 0
    assert kv.late_epoch(0) == epoch_base(1) + 1, "it has waited for words"


def test_an_aborted_step_gives_up_its_wait_at_once():
    _kernels, kv, _ffn, attention, _crossing, _channels = sides(WaitRule(deadline_s=20.0))
    aborter = threading.Timer(0.05, lambda: kv.abort(epoch_base(1)))
    aborter.start()
    begin = time.monotonic()
    attention.wait_norm(0, *norm_arguments(), 1e-6)
    assert 0.04 < time.monotonic() - begin < 5.0
    assert kv.late_epoch(0) > 0


def test_a_wait_sees_a_flag_that_rises_while_it_looks():
    _kernels, kv, _ffn, attention, _crossing, channels = sides(WaitRule(deadline_s=20.0))
    flag = ctypes.c_uint64.from_address(channels[0].map.flag)
    sums = (ctypes.c_float * (2 * HIDDEN)).from_address(channels[0].map.slot(0))

    def produce() -> None:
        sums[:] = [1.0] * (2 * HIDDEN)
        flag.value = epoch_base(1) + 1

    threading.Timer(0.05, produce).start()
    residual, weight, normed = norm_arguments()
    before = residual.clone()
    attention.wait_norm(0, residual, weight, normed, 1e-6)
    assert torch.equal(residual, before + 1.0)
    assert kv.late_epoch(0) == 0


def test_without_waits_nothing_is_late():
    kernels, kv, _ffn, attention, _crossing, _channels = sides(WaitRule(deadline_s=None))
    attention.wait_norm(0, *norm_arguments(), 1e-6)
    end_pass(kernels, kv, 1)
    assert kv.is_drained
    assert kv.late_epoch(0) == 0


def test_an_older_flag_is_not_enough():
    _kernels, kv, _ffn, attention, _crossing, channels = sides(WaitRule(deadline_s=0.02))
    ctypes.c_uint64.from_address(channels[0].map.flag).value = epoch_base(1)
    attention.wait_norm(0, *norm_arguments(), 1e-6)
    assert kv.late_epoch(0) == epoch_base(1) + 1


def test_the_ring_goes_round():
    kernels, lane = EmulatedKernels(), LaneMemory(CPU, WaitRule())
    ids, positions, lengths = (torch.zeros(2, dtype=torch.int32) for _ in range(3))
    for step in range(1, RING_SLOTS + 3):
        lane.push(epoch_base(step), 1, 2, [step, step + 1], [step, 0])
        begin_pass(kernels, lane, ids, positions, lengths)
        end_pass(kernels, lane, 1)
        assert ids.tolist() == [step, step + 1]
        assert (positions.tolist(), lengths.tolist()) == ([step, 0], [step + 1, 1])
        assert lane.is_drained
