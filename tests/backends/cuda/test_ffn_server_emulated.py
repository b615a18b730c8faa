"""The resident FFN server on the CPU: its own source, against the launched kernels, bit for bit."""

from __future__ import annotations

import ctypes
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.channels.channel_map import LinkMap  # noqa: E402
from crosspool.backends.cuda.channels.transport import FFNCrossing  # noqa: E402
from crosspool.backends.cuda.kernels.moe import ffn  # noqa: E402
from crosspool.backends.cuda.kernels.moe_params import FFNScratch  # noqa: E402
from crosspool.backends.cuda.steps.lane_memory import LaneMemory, WaitRule  # noqa: E402
from crosspool.backends.cuda.steps.records import RunPlace  # noqa: E402
from crosspool.backends.cuda.weights_rank.ffn_server import FFNServer, serve_layers  # noqa: E402
from crosspool.models.directory import read_model_dir  # noqa: E402
from tests.backends.cuda.decoding import build_decoder  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402
from tests.backends.cuda.split_pass import OwnedChannel  # noqa: E402
from tests.support.tiny_models import write_tiny_model  # noqa: E402

pytestmark = pytest.mark.judge

CPU = torch.device("cpu")
BASE = 7 * 1024
FAILED = 1
"""Word of a lane: base of its last failed pass (`csrc/crossing.cuh`)."""


def layers_of(family, tmp_path, num_layers=3):
    path = write_tiny_model(tmp_path / family, family, dtype="bfloat16", tokenizer=False, num_layers=num_layers)
    return build_decoder(EmulatedKernels(), read_model_dir(path), 2, 4, CPU)._slices[0].layers


class Lane:
    """One lane of the weights rank, its rows put and its flag raised as a peer would."""

    def __init__(self, layers, rows, *, seed=0, rule=None, words=False, takes_choices=False):
        self.layers, self.rows, self.hidden, self.words = layers, rows, layers[0].hidden, words
        self.inbox, self.outbox = (
            OwnedChannel((2 * rows + 32 if words else rows) * self.hidden, CPU) for _ in range(2)
        )
        self.memory = LaneMemory(CPU, rule or WaitRule())
        crossing = FFNCrossing(EmulatedKernels(), self.memory, LinkMap(self.inbox.map, self.outbox.map))
        scratch = FFNScratch.for_layers(list(layers), rows, CPU)
        self.served = serve_layers(layers, crossing, rows, scratch, takes_choices=takes_choices)
        generator = torch.Generator().manual_seed(seed)
        self.x = [torch.randn(rows, self.hidden, generator=generator).bfloat16() for _ in range(2)]
        for parity, x in enumerate(self.x):
            ctypes.memmove(self.inbox.map.slot(parity), x.data_ptr(), x.nbytes)
        self.choices = [self.choose(parity, generator) for parity in range(2)] if takes_choices else [None, None]

    def choose(self, parity, generator):
        """Experts and weights, drawn, behind the rows of this parity, as a router on the KV rank would leave them."""
        spec = self.layers[0].spec
        at = self.inbox.map.choices(parity, self.rows, self.hidden, spec.top_k)
        ids = [torch.randperm(spec.num_experts, generator=generator)[: spec.top_k] for _ in range(self.rows)]
        ids = torch.stack(ids).int().contiguous()
        weights = torch.rand(self.rows, spec.top_k, generator=generator)
        scales = torch.rand(self.rows, generator=generator)
        for address, tensor in ((at.ids, ids), (at.weights, weights), (at.scales, scales)):
            ctypes.memmove(address, tensor.data_ptr(), tensor.nbytes)
        return at

    def raise_flag(self, epoch):
        ctypes.c_uint64.from_address(self.inbox.map.flag).value = epoch

    @property
    def answered(self):
        return ctypes.c_uint64.from_address(self.outbox.map.flag).value

    def sums_at(self, layer):
        outbox = self.outbox.map
        return outbox.words(layer, self.rows, self.hidden).address if self.words else outbox.slot(layer)

    def sums(self, layer):
        floats = self.rows * self.hidden * (1 + self.words)
        buffer = (ctypes.c_float * floats).from_address(self.sums_at(layer))
        values = torch.frombuffer(buffer, dtype=torch.float32).clone()
        return (values[::2] if self.words else values).reshape(self.rows, self.hidden)

    def epochs(self, layer):
        buffer = (ctypes.c_uint32 * (2 * self.rows * self.hidden)).from_address(self.sums_at(layer))
        return set(buffer[1::2])

    def check(self, last):
        """The last two layers' sums are still in their slots."""
        for layer in range(max(0, last - 1), last + 1):
            out = torch.empty(self.rows, self.hidden)
            scratch = FFNScratch.for_layers(list(self.layers), self.rows, CPU)
            kernels, choices = EmulatedKernels(num_sms=3), self.choices[layer & 1]
            ffn(kernels, self.layers[layer], self.x[layer & 1], out, scratch, choices=choices)
            assert torch.equal(self.sums(layer), out), f"layer {layer}"


@pytest.mark.parametrize(
    ("family", "rows", "backwards"),
    [
        ("qwen3_moe", 1, False),
        ("qwen3_moe", 3, True),
        ("qwen3_moe", 9, True),
        ("deepseek_v2", 1, True),
        ("qwen2_moe", 3, False),
        ("gpt_oss", 1, False),
    ],
)
def test_a_pass_is_served_layer_by_layer(family, rows, backwards, tmp_path):
    lane = Lane(layers_of(family, tmp_path), rows)
    server = FFNServer(EmulatedKernels(num_sms=3, backwards=backwards), CPU, [lane.memory], idle_s=0.0)
    for step in range(1, 3):
        lane.raise_flag(BASE * step + 3)
        server.post(lane.memory, lane.served, BASE * step)
        assert lane.answered == BASE * step + 3
        assert lane.memory.done_epoch == BASE * step + 3
        lane.check(2)
    assert server.has_left
    assert lane.memory.late_epoch(0) == 0


def test_sums_may_cross_as_words_that_carry_their_epoch(tmp_path):
    lane = Lane(layers_of("qwen3_moe", tmp_path), 2, words=True)
    server = FFNServer(EmulatedKernels(num_sms=3), CPU, [lane.memory], idle_s=0.0)
    lane.raise_flag(BASE + 3)
    server.post(lane.memory, lane.served, BASE)
    lane.check(2)
    assert lane.memory.done_epoch == BASE + 3
    assert [lane.epochs(layer) for layer in (1, 2)] == [{BASE + 2}, {BASE + 3}]
    assert lane.answered == 0  # no flag is raised


@pytest.mark.parametrize(("family", "rows"), [("qwen3_moe", 1), ("qwen3_moe", 5), ("qwen2_moe", 2)])
def test_experts_may_come_with_the_rows(family, rows, tmp_path):
    lane = Lane(layers_of(family, tmp_path), rows, takes_choices=True)
    server = FFNServer(EmulatedKernels(num_sms=3), CPU, [lane.memory], idle_s=0.0)
    lane.raise_flag(BASE + 3)
    server.post(lane.memory, lane.served, BASE)
    lane.check(2)
    own = Lane(lane.layers, rows)
    own.raise_flag(BASE + 3)
    server.post(own.memory, own.served, BASE)
    own.check(2)
    assert not torch.equal(own.sums(2), lane.sums(2))  # its own router chooses otherwise


def test_lanes_of_different_models_take_turns_and_none_is_mixed_up(tmp_path):
    lanes = [
        Lane(layers_of("qwen3_moe", tmp_path, 4), 2, seed=1),
        Lane(layers_of("deepseek_v2", tmp_path, 3), 1, seed=2),
        Lane(layers_of("gpt_oss", tmp_path, 2), 3, seed=3),
    ]
    server = FFNServer(EmulatedKernels(num_sms=3), CPU, [lane.memory for lane in lanes], idle_s=0.0)
    for place, lane in enumerate(lanes):
        lane.raise_flag(BASE + len(lane.layers))
        if place < 2:  # posted before the launch; the last one is posted through the server, which starts it
            lane.memory.post(BASE, lane.served.num_layers, lane.served.layers.data_ptr())
    server.reserve(max(lane.served.smem_bytes for lane in lanes))
    server.post(lanes[2].memory, lanes[2].served, BASE)
    for lane in lanes:
        assert lane.answered == BASE + len(lane.layers)
        lane.check(len(lane.layers) - 1)


@pytest.mark.parametrize("is_posted_late", [False, True])
def test_a_lane_begins_its_next_pass_while_anothers_is_under_way(is_posted_late, tmp_path):
    """Else lanes of unlike models would take equally long for a step. The deep lane's last rows come only then."""
    shallow = Lane(layers_of("qwen3_moe", tmp_path, 2), 1, seed=1)
    deep = Lane(layers_of("deepseek_v2", tmp_path, 40), 1, seed=2, rule=WaitRule(deadline_s=60.0))
    shallow.raise_flag(BASE * 3 + 2)
    deep.raise_flag(BASE + (1 if not is_posted_late else 39))
    server = FFNServer(EmulatedKernels(num_sms=3), CPU, [shallow.memory, deep.memory], idle_s=0.0)
    server.reserve(max(lane.served.smem_bytes for lane in (shallow, deep)))
    deep.memory.post(BASE, 40, deep.served.layers.data_ptr())
    if not is_posted_late:
        shallow.memory.post(BASE, 2, shallow.served.layers.data_ptr())
    ended = []

    def watch():
        until_s = time.monotonic() + 20
        while shallow.memory.done_epoch < BASE + 2 and time.monotonic() < until_s:
            time.sleep(1e-4)
        if is_posted_late:
            shallow.memory.post(BASE * 2, 2, shallow.served.layers.data_ptr())
        while shallow.memory.done_epoch < BASE * 2 + 2 and time.monotonic() < until_s:
            time.sleep(1e-4)
        ended.append((shallow.memory.done_epoch, deep.memory.done_epoch))
        deep.raise_flag(BASE + 40)

    watcher = threading.Thread(target=watch)
    watcher.start()
    server.post(shallow.memory, shallow.served, BASE if is_posted_late else BASE * 2)
    watcher.join()
    assert ended == [(BASE * 2 + 2, 0)]
    assert deep.memory.done_epoch == BASE + 40
    shallow.check(1)
    deep.check(39)


def test_two_passes_posted_ahead_run_in_order(tmp_path):
    lane = Lane(layers_of("qwen3_moe", tmp_path), 1)
    server = FFNServer(EmulatedKernels(num_sms=3), CPU, [lane.memory], idle_s=0.0)
    lane.raise_flag(BASE * 2 + 3)
    lane.memory.post(BASE, 3, lane.served.layers.data_ptr())
    server.post(lane.memory, lane.served, BASE * 2)
    assert lane.memory.done_epoch == BASE * 2 + 3
    lane.check(2)


def test_passes_of_a_run_that_has_ended_early_are_skipped(tmp_path):
    lane = Lane(layers_of("qwen3_moe", tmp_path), 1)
    server = FFNServer(EmulatedKernels(num_sms=3), CPU, [lane.memory], idle_s=0.0)
    over = BASE + 10
    for step in range(2):
        lane.memory.post(BASE + 3 * step, 3, lane.served.layers.data_ptr(), RunPlace(over, step, 2 - step))
    lane.raise_flag(over)  # the KV rank has ended the run with its first step
    server.post(lane.memory, lane.served, BASE + 6, RunPlace(over, 2, 0))
    assert lane.memory.done_epoch == BASE + 9
    assert lane.answered == BASE + 3, "the first pass alone was computed"
    lane.raise_flag(BASE * 2 + 3)
    server.post(lane.memory, lane.served, BASE * 2)
    assert lane.answered == BASE * 2 + 3, "and the lane goes on"


def test_a_run_that_does_not_begin_is_skipped_whole(tmp_path):
    """It was posted while the run before it went on, and its rows ended with that."""
    lane = Lane(layers_of("qwen3_moe", tmp_path), 1)
    server = FFNServer(EmulatedKernels(num_sms=3), CPU, [lane.memory], idle_s=0.0)
    over = BASE + 10
    lane.raise_flag(over)
    for step in range(2):
        place = RunPlace(over, step, 2 - step, may_be_first=True)
        lane.memory.post(BASE + 3 * step, 3, lane.served.layers.data_ptr(), place)
    server.post(lane.memory, lane.served, BASE + 6, RunPlace(over, 2, 0))
    assert lane.memory.done_epoch == BASE + 9
    assert lane.answered < BASE
    lane.raise_flag(BASE * 2 + 3)
    server.post(lane.memory, lane.served, BASE * 2)
    assert lane.memory.done_epoch == BASE * 2 + 3
    assert lane.answered == BASE * 2 + 3


def test_a_peer_past_its_deadline_ends_its_pass_alone(tmp_path):
    late = Lane(layers_of("qwen3_moe", tmp_path), 1, rule=WaitRule(deadline_s=0.3))
    good = Lane(late.layers, 2, seed=5)
    server = FFNServer(EmulatedKernels(num_sms=3), CPU, [late.memory, good.memory], idle_s=0.0)
    late.raise_flag(BASE + 1)  # the first layer's rows come, no more
    good.raise_flag(BASE + 3)
    late.memory.post(BASE, 3, late.served.layers.data_ptr())
    server.post(good.memory, good.served, BASE)
    assert late.memory.late_epoch(0) == BASE + 2
    assert late.memory.done_epoch == BASE + 3
    good.check(2)


def test_the_only_pass_past_its_deadline_runs_on_and_ends(tmp_path):
    late = Lane(layers_of("qwen3_moe", tmp_path), 1, rule=WaitRule(deadline_s=0.3))
    server = FFNServer(EmulatedKernels(num_sms=3), CPU, [late.memory], idle_s=0.0)
    late.raise_flag(BASE + 1)
    server.post(late.memory, late.served, BASE)
    assert late.memory.late_epoch(0) == BASE + 2
    assert late.memory.done_epoch == BASE + 3
    late.raise_flag(BASE * 2 + 3)
    server.post(late.memory, late.served, BASE * 2)
    assert late.answered == BASE * 2 + 3
    late.check(2)


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_a_pass_whose_experts_do_not_come_ends(rows, tmp_path):
    """A slot that nobody has written names one expert several times, so that lists lack some of a token's pairs."""
    lane = Lane(layers_of("qwen3_moe", tmp_path), rows, rule=WaitRule(deadline_s=0.3), takes_choices=True)
    server = FFNServer(EmulatedKernels(num_sms=3), CPU, [lane.memory], idle_s=0.0)
    ids, num_bytes = lane.choices[1].ids, 4 * rows * lane.layers[0].spec.top_k
    drawn = ctypes.string_at(ids, num_bytes)
    ctypes.memset(ids, 0, num_bytes)
    lane.raise_flag(BASE + 1)
    served = threading.Thread(target=server.post, args=(lane.memory, lane.served, BASE), daemon=True)
    served.start()
    served.join(300)
    assert not served.is_alive()
    assert lane.memory.late_epoch(0) == BASE + 2
    assert lane.memory.done_epoch == BASE + 3
    ctypes.memmove(ids, drawn, num_bytes)
    lane.raise_flag(BASE * 2 + 3)
    server.post(lane.memory, lane.served, BASE * 2)
    lane.check(2)


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("words", [False, True])
def test_nobody_is_told_of_sums_whose_rows_did_not_come(words, is_last, tmp_path):
    """A KV rank that was only slow would else find them, and may end the step with a wrong token."""
    lane = Lane(layers_of("qwen3_moe", tmp_path), 2, rule=WaitRule(deadline_s=0.2), words=words)
    server = FFNServer(EmulatedKernels(num_sms=3), CPU, [lane.memory], idle_s=0.0)
    missing = 2 if is_last else 1
    lane.raise_flag(BASE + missing)
    server.post(lane.memory, lane.served, BASE)
    assert lane.memory.late_epoch(0) == BASE + missing + 1
    assert lane.memory.done_epoch == BASE + 3
    assert lane.epochs(missing) == {0} if words else lane.answered == BASE + missing
    lane.raise_flag(BASE * 2 + 3)
    server.post(lane.memory, lane.served, BASE * 2)
    lane.check(2)
    assert lane.epochs(2) == {BASE * 2 + 3} if words else lane.answered == BASE * 2 + 3


@pytest.mark.parametrize("words", [False, True])
def test_nobody_is_told_of_sums_whose_rows_came_as_a_wait_gave_up(words, tmp_path):
    """Blocks that gave up have read what lay there before; others find the rows, but take what those make of theirs."""
    lane = Lane(layers_of("qwen3_moe", tmp_path), 2, words=words)
    server = FFNServer(EmulatedKernels(num_sms=3), CPU, [lane.memory], idle_s=0.0)
    lane.memory.words[FAILED] = BASE
    lane.raise_flag(BASE + 3)
    server.post(lane.memory, lane.served, BASE)
    assert lane.memory.done_epoch == BASE + 3
    assert [lane.epochs(layer) for layer in (1, 2)] == [{0}, {0}] if words else lane.answered == 0
    lane.raise_flag(BASE * 2 + 3)
    server.post(lane.memory, lane.served, BASE * 2)
    lane.check(2)


@pytest.mark.parametrize("deadline_s", [0.2, None])
def test_a_pass_ends_though_blocks_read_different_experts_of_a_peer(deadline_s, tmp_path):
    """Each then waits for activations that the others do not make. None: no wait holds the peer back."""
    lane = Lane(layers_of("qwen3_moe", tmp_path), 2, rule=WaitRule(deadline_s=deadline_s), takes_choices=True)
    kernels = EmulatedKernels(num_sms=3)
    server = FFNServer(kernels, CPU, [lane.memory], idle_s=0.0)
    drawn = (ctypes.c_uint32 * 4).from_address(lane.choices[1].ids)
    lane.raise_flag(BASE + 1)
    kernels.overwrite_late("ffn_server", lane.choices[1].ids, [(expert + 3) % 8 for expert in drawn])
    served = threading.Thread(target=server.post, args=(lane.memory, lane.served, BASE), daemon=True)
    served.start()
    served.join(300)  # the kernel may have to be compiled first
    assert not served.is_alive()
    kernels.overwrite_late("ffn_server", 0, [])
    assert lane.memory.done_epoch == BASE + 3
    assert (lane.memory.late_epoch(0), lane.answered) == ((0, BASE + 3) if deadline_s is None else (BASE + 2, BASE + 1))
    lane.raise_flag(BASE * 2 + 3)
    server.post(lane.memory, lane.served, BASE * 2)
    lane.check(2)


def test_a_pass_that_the_host_gives_up_ends_at_once(tmp_path):
    lane = Lane(layers_of("qwen3_moe", tmp_path), 1, rule=WaitRule(deadline_s=60.0))
    server = FFNServer(EmulatedKernels(num_sms=3), CPU, [lane.memory], idle_s=0.0)
    lane.memory.abort(BASE + 3)
    server.post(lane.memory, lane.served, BASE)
    assert lane.memory.done_epoch == BASE + 3
    assert lane.answered == 0


def test_the_graph_tier_goes_on_where_the_server_stopped(tmp_path):
    """Both take the lane's records in turn: a served pass moves the cursor that captured passes read."""
    from crosspool.backends.cuda.channels.transport import begin_pass

    lane = Lane(layers_of("qwen3_moe", tmp_path), 1)
    server = FFNServer(EmulatedKernels(num_sms=3), CPU, [lane.memory], idle_s=0.0)
    lane.raise_flag(BASE + 3)
    server.post(lane.memory, lane.served, BASE)
    server.stop()
    lane.memory.push(BASE * 2, 3)
    begin_pass(EmulatedKernels(), lane.memory)
    assert int(lane.memory.words[0]) == BASE * 2
    begin_again = BASE * 3
    lane.raise_flag(begin_again + 3)
    server.post(lane.memory, lane.served, begin_again)
    assert lane.memory.done_epoch == begin_again + 3
