"""Control is data: any prefix of a schedule leaves the same in every backend and by every control, buffer by buffer."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from crosspool.backends.cuda.channels.channel_map import LinkMap  # noqa: E402
from crosspool.backends.cuda.channels.transport import FFNCrossing  # noqa: E402
from crosspool.backends.cuda.kernels.moe_params import FFNScratch  # noqa: E402
from crosspool.backends.cuda.steps.lane_memory import WaitRule  # noqa: E402
from crosspool.backends.cuda.weights_rank.ffn_server import FFNServer, serve_layers  # noqa: E402
from crosspool.core import SamplingParams  # noqa: E402
from crosspool.kv_pool.geometry import page_geometry  # noqa: E402
from crosspool.models.directory import read_model_dir  # noqa: E402
from crosspool.models.spec import GQASpec  # noqa: E402
from tests.backends.cuda.decoding import CLOSE_SHARE, FRAME_BYTES, TOLERANCE, build_decoder  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402
from tests.backends.cuda.split_pass import SplitPass  # noqa: E402
from tests.backends.cuda.worker_pair import NUM_FRAMES, PAGE_TOKENS, Pair  # noqa: E402
from tests.support.direct_lanes import SplitModel  # noqa: E402
from tests.support.run_schedules import prefill, runs  # noqa: E402
from tests.support.tiny_models import write_tiny_model  # noqa: E402

pytestmark = [pytest.mark.judge, pytest.mark.triton]

CPU = torch.device("cpu")
ROWS, PROMPT_LENGTHS, RUN_LENGTHS, PAGES = 2, (5, 9), (3, 1, 2), 3
GREEDY = SamplingParams(max_tokens=50, temperature=0.0)


class ServedPass(SplitPass):
    """Its FFNs by a resident server, which stays for as long as a pass of this lane."""

    def serve(self, slices) -> None:
        (memory,), (part,) = self.ffn_lanes, slices
        crossing = FFNCrossing(EmulatedKernels(), memory, LinkMap(self.a2f[0].map, self.f2a[0].map))
        scratch = FFNScratch.for_layers(list(part.layers), self.rows, CPU)
        self.served = serve_layers(part.layers, crossing, self.rows, scratch)
        self.server = FFNServer(EmulatedKernels(num_sms=3), CPU, [memory], idle_s=0.0)

    def step(self, base, token_ids, positions) -> None:
        self.lane.push(base, self.half.spec.num_layers, self.rows, token_ids, positions)
        served = threading.Thread(target=self.server.post, args=(self.ffn_lanes[0], self.served, base))
        served.start()
        for _layer in self.attention.kernels():
            pass
        served.join()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_any_prefix_leaves_the_same_by_launched_kernels_and_by_the_server(family, tmp_path):
    """Bit for bit: the KV cache, the residual stream, the logits and the sums that lie in the KV rank's slots."""
    directory = read_model_dir(write_tiny_model(tmp_path / "m", family, dtype="bfloat16", tokenizer=False))
    decoders = [build_decoder(EmulatedKernels(), directory, ROWS, 4, CPU) for _ in range(2)]
    rule = WaitRule(deadline_s=300.0)  # kernels may have to be compiled first
    launched, resident = (
        kind(EmulatedKernels(), decoder.attention, decoder._slices, rule=rule)
        for kind, decoder in zip((SplitPass, ServedPass), decoders, strict=True)
    )
    resident.serve(decoders[1]._slices)
    schedule = np.random.default_rng(4).integers(1, directory.spec.vocab_size, size=(4, ROWS)).tolist()
    for position, ids in enumerate(schedule):
        base = 1024 * (position + 1)
        launched.push(base, ids, [position] * ROWS)
        launched.run()
        resident.step(base, ids, [position] * ROWS)
        for mine, theirs in zip(buffers(launched), buffers(resident), strict=True):
            assert torch.equal(mine, theirs)
        assert resident.lane.done_epoch == resident.ffn_lanes[0].done_epoch == base + directory.spec.num_layers
    assert resident.lane.late_epoch(0) == resident.ffn_lanes[0].late_epoch(0) == 0


def buffers(split):
    half, slots = split.half, split.f2a[0].map
    start = slots.slot(0) - split.f2a[0].memory.data_ptr()
    sums = split.f2a[0].memory[start : start + 2 * (slots.slot(1) - slots.slot(0))]
    return half.cache.frames, half.residual, half.logits_out, sums


def cached(arena, geometry, table, num_tokens, layer, dtype):
    """(num_tokens, elements) float32: what one layer has of a sequence whose block table is `table`."""
    first, width = geometry.offset_of_layer(layer), geometry.token_layer_bytes
    found = []
    for token in range(num_tokens):
        page, slot = divmod(token, geometry.page_tokens)
        at = first + slot * width
        found.append(arena[table[page][geometry.frame_of_layer(layer)], at : at + width].view(dtype))
    return np.array(found).astype(np.float32)[:, : geometry.elements_per_token_layer]


def as_on_gpus(rows, attention):
    """NumPy workers keep what rotary embedding turns together side by side."""
    if not isinstance(attention, GQASpec):
        return rows
    num_keys = attention.num_kv_heads * attention.head_dim
    keys = rows[:, :num_keys].reshape(len(rows), attention.num_kv_heads, -1, 2).swapaxes(2, 3)
    return np.concatenate([keys.reshape(len(rows), -1), rows[:, num_keys:]], axis=1)


@pytest.mark.parametrize("prefix", [1, 2, 3, 5])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_any_prefix_leaves_the_kv_of_the_numpy_workers(family, prefix, tmp_path):
    """bfloat16 against float32, slot by slot in every layer. Prompts, then runs of decode steps."""
    directory = read_model_dir(write_tiny_model(tmp_path / "m", family, dtype="bfloat16", tokenizer=False))
    spec = directory.spec
    rng = np.random.default_rng(7)
    prompts = [rng.integers(1, spec.vocab_size, length).tolist() for length in PROMPT_LENGTHS]
    cuda = Pair(directory, 2)
    numpy = SplitModel(directory, 2, page_tokens=PAGE_TOKENS, num_frames=NUM_FRAMES, frame_bytes=FRAME_BYTES)
    kv = []
    for model, name, dtype in ((cuda, "tiny", "bfloat16"), (numpy, spec.family, "float32")):
        geometry = page_geometry(spec, page_tokens=PAGE_TOKENS, frame_bytes=FRAME_BYTES, kv_dtype=dtype)
        begin = prefill(name, geometry, prompts, (GREEDY, GREEDY), pages=PAGES)
        steps = [*begin, *runs(name, prompts, RUN_LENGTHS)][:prefix]
        for step in steps:
            model.run(step)
        arena = cuda.kv._models.led(name).frames.numpy() if model is cuda else numpy.attention._arena
        decoded = sum(step.num_steps for step in steps[len(begin) :])
        lengths = [len(prompt) + decoded for prompt in prompts]
        tables = [step.rows[0].new_pages for step in begin[:prefix]]
        kv.append([])
        for layer, layer_spec in enumerate(spec.layers):
            for table, length in zip(tables, lengths, strict=False):
                if model is cuda:
                    kv[-1].append(cached(arena, geometry, table, length, layer, ml_dtypes.bfloat16))
                else:
                    rows = cached(arena, geometry, table, length, layer, np.float32)
                    kv[-1].append(as_on_gpus(rows, layer_spec.attention))
    found, expected = (np.concatenate(each) for each in kv)
    assert is_close(found, expected) >= CLOSE_SHARE
    assert is_close(found[::-1], expected) < 0.5, "slots in another order are not taken for the same"


def is_close(found, expected):
    """Which share of slots is."""
    error = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    return float((error <= TOLERANCE).mean())
