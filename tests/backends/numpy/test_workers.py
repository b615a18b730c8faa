"""The two workers: split equals whole bit for bit, replays change nothing, memory lies where it belongs."""

import gc
import itertools
import mmap
from dataclasses import replace
from types import FunctionType, ModuleType

import numpy as np
import pytest

from crosspool.backends.numpy.ffn_worker import NumpyFFNWorker
from crosspool.backends.numpy.host_vmm import HostVmmDriver
from crosspool.backends.numpy.kv_worker import NumpyAttentionWorker
from crosspool.cluster.base import ModelPlacement
from crosspool.cluster.loading import LoadCancelledError
from crosspool.kv_pool.backing.mapped_frames import MappedFrames
from crosspool.kv_pool.geometry import page_geometry
from crosspool.weights_pool.loader import load_attention_weights
from tests.support.direct_lanes import ignore_progress
from tests.support.model_size import num_parameters
from tests.support.split_and_whole import (
    FRAME_BYTES,
    NUM_FRAMES,
    PAGE_TOKENS,
    SEEDED,
    model_dir,
    script,
    split,
    whole,
)
from tests.support.step_script import Script
from tests.support.tiny_models import CONFIGS


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("num_weights", [1, 2, 3])
def test_split_equals_whole_bit_for_bit(family, num_weights):
    pools, model = split(family, num_weights), whole(family, num_weights)
    rng = np.random.default_rng(num_weights)
    num_sampled = 0
    for step in script(family, seed=num_weights):
        expected = model.run(step)
        assert pools.run(step, rng) == expected
        num_sampled += len(expected)
    assert num_sampled == 30
    assert (pools.attention._arena == model._worker._arena).all()


def test_swapped_slices_add_up_in_another_order():
    """Negative control: the comparison above sees the order of the sums."""
    model = whole("qwen3_moe", 3)
    reference = whole("qwen3_moe", 3)
    model._ffn.reverse()
    for step in script("qwen3_moe", num_output=2):
        model.run(step)
        reference.run(step)
    assert not (model._worker._arena == reference._worker._arena).all()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss"])
def test_a_step_that_fails_anywhere_and_is_replayed_changes_nothing(family):
    pools, undisturbed = split(family, 2), split(family, 2)
    rng = np.random.default_rng(1)
    for number, step in enumerate(script(family, seed=3)):
        expected = undisturbed.run(step)
        for attempt in range(int(rng.integers(0, 3))):
            # Anywhere: before the first segment, between two, or at the end without a report.
            pools.run(step.replayed(step.header.step_seq + attempt), rng, max_segments=int(rng.integers(0, 16)))
        assert pools.run(step.replayed(step.header.step_seq + 5), rng) == expected, f"step {number}"


def test_a_replay_may_come_without_joining_once_the_step_has_run():
    pools = split("qwen3_moe")
    first = next(script("qwen3_moe", lengths=(5,)))
    expected = pools.run(first)
    again = replace(first.replayed(first.header.step_seq + 1), joining=())
    assert pools.run(again) == expected


def test_a_lost_sequence_prefilled_with_its_tokens_so_far_goes_on_the_same():
    family = "qwen3_moe"
    spec = model_dir(family).spec
    prompt = list(range(20, 29))
    params = [replace(SEEDED, frequency_penalty=0.7, min_tokens=6, stop_token_ids=tuple(range(50)))]
    geometry = page_geometry(spec, page_tokens=PAGE_TOKENS, frame_bytes=FRAME_BYTES, kv_dtype="float32")

    def steps(prompt, num_output, seed):
        return Script(family, geometry, [prompt], params, num_output=num_output, num_frames=99, seed=seed).steps()

    undisturbed = split(family)
    tokens = [sampled.token_id for step in steps(prompt, 12, 0) for sampled in undisturbed.run(step)]
    restarted = split(family)
    resumed = []
    for step in steps([*prompt, *tokens[:5]], 7, 1):
        joining = tuple(
            replace(new, prompt_token_ids=tuple(prompt), output_token_ids=tuple(tokens[:5])) for new in step.joining
        )
        resumed += [sampled.token_id for sampled in restarted.run(replace(step, joining=joining))]
    assert resumed == tokens[5:]


@pytest.mark.parametrize("family", CONFIGS)
def test_a_row_alone_and_in_company_agree(family):
    spec = model_dir(family).spec
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, spec.vocab_size, length).tolist() for length in (9, 3, 14)]
    model = whole(family)
    alone = [model.trace(prompt)[1][-1] for prompt in prompts]
    steps = list(script(family, lengths=(9, 3, 14)))
    joining = {new.sequence_id: new for step in steps for new in step.joining}
    geometry = page_geometry(spec, page_tokens=PAGE_TOKENS, frame_bytes=FRAME_BYTES, kv_dtype="float32")
    frames = iter(range(1, NUM_FRAMES))
    rows = tuple(
        steps[0]
        .rows[0]
        ._replace(
            sequence_id=idx,
            token_ids=tuple(prompt),
            num_cached_tokens=0,
            num_new_tokens=len(prompt),
            first_new_page=0,
            new_pages=tuple(
                tuple(next(frames) for _ in range(geometry.frames_per_page))
                for _ in range(geometry.num_pages(len(prompt)))
            ),
            sample=True,
        )
        for idx, prompt in enumerate(prompts)
    )
    header = steps[0].header._replace(num_tokens=26)
    step = replace(steps[0], header=header, rows=rows, joining=tuple(joining[idx] for idx in range(3)))
    attention = model._begin(step)
    for _ in model._layers(attention):
        pass
    for logits, expected in zip(attention.logits(), alone, strict=True):
        assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()


def test_pools_hold_their_own_bytes_and_give_them_back():
    family = "deepseek_v2"
    spec = model_dir(family).spec
    pools = split(family)
    attention = pools.attention.memory_bytes()
    assert attention["ffn_weights"] == 0
    assert attention["kv_cache"] == NUM_FRAMES * FRAME_BYTES
    assert attention["attention_weights"] == 4 * num_parameters(spec, "kv")
    assert pools.ffn["w0"].memory_bytes() == {"ffn_weights": 4 * num_parameters(spec, "weights"), "kv_cache": 0}
    pools.run(next(script(family)))
    pools.attention.remove_model(family)
    pools.ffn["w0"].remove_model(family)
    assert pools.attention.memory_bytes()["attention_weights"] == 0
    assert pools.ffn["w0"].memory_bytes()["ffn_weights"] == 0
    assert not pools.attention._sequences


def held_bytes(root):
    """Bytes of every array that can be reached from `root`, each counted once."""
    seen, arrays, left = set(), {}, [root]
    while left:
        held = left.pop()
        if id(held) in seen or isinstance(held, type | ModuleType | FunctionType):
            continue
        seen.add(id(held))
        if isinstance(held, np.ndarray):
            while isinstance(held.base, np.ndarray):
                held = held.base
            arrays[id(held)] = held.nbytes
        else:
            left += gc.get_referents(held)
    return sum(arrays.values())


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "glm4_moe_lite"])
def test_what_the_pools_really_hold_is_what_they_say(family):
    """The accounts are checked against the arrays themselves: nothing of the other pool hides in either."""
    pools = split(family, num_weights=2)
    for step in itertools.islice(script(family), 4):
        pools.run(step)
    kv = pools.attention.memory_bytes()
    tables = 160 * 1024  # rotary turns and histories of sequences, which are in no account
    assert kv["kv_cache"] + kv["attention_weights"] <= held_bytes(pools.attention)
    assert held_bytes(pools.attention) < kv["kv_cache"] + kv["attention_weights"] + tables
    smallest_share = min(worker.memory_bytes()["ffn_weights"] for worker in pools.ffn.values())
    assert tables < smallest_share  # else a share could hide in what is allowed
    for worker in pools.ffn.values():
        assert held_bytes(worker) == worker.memory_bytes()["ffn_weights"]


def test_forgotten_and_unknown_sequences_are_named():
    pools = split("qwen3_moe")
    steps = script("qwen3_moe", lengths=(5,))
    first, second = next(steps), next(steps)
    pools.run(first)
    pools.attention.forget([0, 12345])
    with pytest.raises(ValueError, match="sequence 0 is not known here"):
        pools.run(second)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"new_pages": ()}, "needs 5 slots and has 0 pages of 8"),
        ({"new_pages": ((0, 0),)}, "a page of qwen3_moe is 1 frames, and frame 0 is reserved"),
        ({"new_pages": ((0,),)}, "frame 0 is reserved"),
        ({"first_new_page": 2}, "page 2 of sequence 0 comes after the 0 pages known here"),
        ({"num_new_tokens": 4, "token_ids": (1, 2, 3, 4)}, "rows hold 4 tokens, its header says 5"),
    ],
)
def test_rows_that_do_not_fit_are_refused(change, message):
    pools = split("qwen3_moe")
    (row,) = (step := next(script("qwen3_moe", lengths=(5,), num_output=1))).rows
    row = row._replace(token_ids=(1,) * 5, num_new_tokens=5, new_pages=((1,),))
    step = replace(step, header=step.header._replace(num_tokens=5), rows=(row._replace(**change),))
    with pytest.raises(ValueError, match=message):
        pools.run(step)


def test_a_prompt_outside_the_vocabulary_is_refused():
    pools = split("qwen3_moe")
    step = next(script("qwen3_moe", lengths=(5,)))
    (new,) = step.joining
    for wrong in (-1, 512):
        step = replace(step, joining=(replace(new, prompt_token_ids=(1, wrong)),))
        with pytest.raises(ValueError, match=f"token id {wrong} is not in the vocabulary of qwen3_moe; .* 0..511"):
            pools.run(step)


def test_unknown_models_and_misplaced_shares_are_named():
    step = next(script("qwen3_moe", lengths=(5,)))
    pools = split("qwen3_moe")
    unknown = replace(step, header=step.header._replace(model="gone"))
    with pytest.raises(ValueError, match=r"model 'gone' is not on (this KV|rank w0)"):
        pools.run(unknown)


def test_a_model_whose_layer_does_not_fit_a_frame_leaves_nothing_behind():
    worker = NumpyAttentionWorker(4, 1024)
    directory = model_dir("qwen3_moe")
    weights = load_attention_weights(directory)
    with pytest.raises(ValueError, match=r"more than a 1\.0 KiB frame; set page_tokens <= "):
        worker.add_weights("q", directory.spec, weights.model, weights.layers, 64)
    assert worker.memory_bytes()["attention_weights"] == 0


def placement(**changes):
    values = {
        "name": "m",
        "directory": model_dir("qwen3_moe").path,
        "hidden_size": 64,
        "kv_rank": "kv0",
        "weights_ranks": ("w0", "w1"),
        "page_tokens": 8,
        "frame_bytes": FRAME_BYTES,
    }
    return ModelPlacement(**values | changes)


def test_an_ffn_worker_refuses_a_placement_without_it():
    with pytest.raises(ValueError, match="not on rank w7"):
        NumpyFFNWorker("w7").add_model(placement(), ignore_progress)


def test_a_load_that_ends_early_leaves_its_name_free_where_frames_are_mapped():
    def given_up(loaded_bytes, total_bytes):
        raise LoadCancelledError("given up")

    mapped = MappedFrames(HostVmmDriver(), NUM_FRAMES, FRAME_BYTES, mmap.PAGESIZE)
    try:
        worker = NumpyAttentionWorker(NUM_FRAMES, FRAME_BYTES, mapped=mapped)
        with pytest.raises(LoadCancelledError):
            worker.add_model(placement(), given_up)
        worker.add_model(placement(), ignore_progress)
        worker.remove_model(placement().name)
    finally:
        mapped.close()


def test_a_kv_worker_refuses_a_placement_with_other_frames():
    with pytest.raises(ValueError, match="frames of 4096 bytes, this KV rank has frames of 32768"):
        NumpyAttentionWorker(4, FRAME_BYTES).add_model(placement(frame_bytes=4096), ignore_progress)
