"""A prefill rank's CUDA worker on a CPU: the tokens of the two pools, whatever was cached before and is in place."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from crosspool.backends.base import LaneLinks, NewLink  # noqa: E402
from crosspool.backends.cuda.chunks import chunk_plan, chunk_warm_up  # noqa: E402
from crosspool.backends.cuda.prefill_rank import prefill_models  # noqa: E402
from crosspool.backends.cuda.prefill_rank.prefill_worker import CudaPrefillWorker  # noqa: E402
from crosspool.backends.cuda.prefill_rank.swap import InPlace, Swapper, in_memory  # noqa: E402
from crosspool.backends.cuda.steps.lane_memory import WaitRule  # noqa: E402
from crosspool.cluster.channel import link_bytes  # noqa: E402
from crosspool.cluster.region import ArrayRegion  # noqa: E402
from crosspool.models.directory import read_model_dir  # noqa: E402
from crosspool.scheduler.step import StepDescriptor, StepHeader, StepRow  # noqa: E402
from crosspool.units import MiB  # noqa: E402
from tests.backends.cuda.worker_pair import (  # noqa: E402
    Pair,
    decode_step,
    greedy,
    prefill_step,
    prompt_of,
    site,
)
from tests.support.half_turns import take_turns  # noqa: E402
from tests.support.tiny_models import write_tiny_model  # noqa: E402

pytestmark = [pytest.mark.judge, pytest.mark.triton]


def nothing(loaded, total) -> None: ...


class DedicatedPair(Pair):
    """The two pools and a prefill rank beside them; `most_slots`: of the channels between that and the home."""

    def __init__(self, directory, most_slots: int = 64, room_bytes: int = 64 * MiB) -> None:
        super().__init__(directory)
        devices = {"kv0": 0, "w0": 1, "p0": 2}
        self.placement = replace(self.placement, prefill_ranks=("p0",), context_tokens=104)
        self.prefill = CudaPrefillWorker(site("p0", devices), self.kernels, WaitRule(), room_bytes)
        self.prefill.add_model(self.placement, nothing)
        width = directory.spec.kv_elements_per_token_layer
        capacity = max(-(-width * most_slots // 2), 4 * directory.spec.hidden_size)
        region = ArrayRegion(link_bytes(capacity)).map()
        self.home = self.kv.open_link(NewLink(0, "p0", region, capacity, lambda: None))
        self.rank = self.prefill.open_link(NewLink(0, "kv0", region, capacity, lambda: None))

    def prompt(self, step: StepDescriptor, max_segments: int | None = None):
        """Run a chunk on the prefill rank."""
        step = replace(step, header=step.header._replace(prefill_rank="p0"))
        (home_out, home_in), (out, inlet) = self.home, self.rank
        halves = {
            "kv0": self.kv.run(step, LaneLinks({"p0": home_out}, {"p0": home_in})),
            "p0": self.prefill.run(step, LaneLinks({"kv0": out}, {"kv0": inlet})),
        }
        result, _ = take_turns(halves, "kv0", max_segments=max_segments)
        return result


def later_chunk(prompt, start, stop, step_seq):
    header = StepHeader(lane=0, model="tiny", step_seq=step_seq, phase="prefill", num_tokens=stop - start)
    row = StepRow(
        sequence_id=1,
        token_ids=tuple(prompt[start:stop]),
        num_cached_tokens=start,
        num_new_tokens=stop - start,
        sample=stop == len(prompt),
    )
    return StepDescriptor(header=header, rows=(row,))


def first_chunk(directory, prompt, count, step_seq=1):
    step = prefill_step(directory, prompt, step_seq, greedy(), num_pages=13)
    (row,) = step.rows
    row = row._replace(token_ids=tuple(prompt[:count]), num_new_tokens=count, sample=count == len(prompt))
    return replace(step, header=step.header._replace(num_tokens=count), rows=(row,))


def model(path, family):
    return read_model_dir(write_tiny_model(path, family, dtype="bfloat16", tokenizer=False))


@pytest.mark.parametrize(
    ("family", "most_slots"),
    [("qwen3_moe", 64), ("qwen3_moe", 36), ("deepseek_v2", 36), ("gpt_oss", 64), ("qwen2_moe", 36)],
)
def test_chunks_of_a_prefill_rank_leave_the_cache_and_tokens_of_the_two_pools(
    family, most_slots, tmp_path, monkeypatch
):
    directory = model(tmp_path / "tiny", family)
    monkeypatch.setattr(chunk_plan, "PIECE_TOKENS", 16)
    prompt, (first, second) = prompt_of(directory, 100), (34, 67)
    inline, dedicated = Pair(directory), DedicatedPair(directory, most_slots)
    found = []
    for run, pair in ((inline.run, inline), (dedicated.prompt, dedicated)):
        assert run(first_chunk(directory, prompt, first)) == ()
        assert run(later_chunk(prompt, first, second, 2)) == ()
        tokens = [run(later_chunk(prompt, second, len(prompt), 3))[0].token_id]
        arena = pair.kv._frames.arena.clone()
        for idx in range(3):
            tokens.append(pair.run(decode_step({1: len(prompt) + idx}, 4 + idx))[0].token_id)
        found.append((tokens, arena))
    (tokens, arena), (own_tokens, own_arena) = found
    assert own_tokens == tokens
    is_same = arena[1:] == own_arena[1:]
    assert bool(is_same.all()), f"{int((~is_same).sum())} bytes of KV differ"


def joined_steps(*steps):
    """One step of several sequences' rows."""
    header = steps[0].header._replace(num_tokens=sum(step.header.num_tokens for step in steps))
    rows = tuple(row for step in steps for row in step.rows)
    return StepDescriptor(header=header, rows=rows, joining=tuple(new for step in steps for new in step.joining))


def test_several_sequences_of_a_chunk_keep_their_own_earlier_slots(directory):
    prompts = [prompt_of(directory, 48, seed) for seed in (1, 2)]
    found = []
    for pair in (Pair(directory), DedicatedPair(directory, 54)):
        run = pair.prompt if isinstance(pair, DedicatedPair) else pair.run
        firsts = [
            prefill_step(directory, prompt[:count], 1, greedy(), number, first_frame, 6)
            for number, (prompt, count, first_frame) in enumerate(zip(prompts, (12, 30), (1, 32), strict=True), start=1)
        ]
        firsts = [replace(step, rows=(step.rows[0]._replace(sample=False),)) for step in firsts]
        assert run(joined_steps(*firsts)) == ()
        laters = [
            replace(step, rows=(step.rows[0]._replace(sequence_id=number),))
            for number, step in enumerate(
                (later_chunk(prompts[0], 12, 48, 2), later_chunk(prompts[1], 30, 48, 2)), start=1
            )
        ]
        tokens = [token.token_id for token in run(replace(joined_steps(*laters), joining=()))]
        found.append((tokens, pair.kv._frames.arena[1:].clone()))
    (tokens, arena), (own_tokens, own_arena) = found
    assert own_tokens == tokens
    assert len(tokens) == 2
    assert torch.equal(arena, own_arena)


def test_a_chunk_that_was_given_up_is_run_again(directory):
    prompt = prompt_of(directory, 40)
    (expected,) = Pair(directory).run(first_chunk(directory, prompt, 40))
    pair = DedicatedPair(directory)
    assert pair.prompt(first_chunk(directory, prompt, 40), max_segments=3) is None
    (found,) = pair.prompt(first_chunk(directory, prompt, 40, step_seq=2))
    assert found.token_id == expected.token_id


def test_two_models_take_turns_in_one_place_and_next_to_each_other_in_two(directory, tmp_path):
    other = read_model_dir(write_tiny_model(tmp_path / "other", "qwen3_moe", dtype="bfloat16", tokenizer=False, seed=3))
    prompt = prompt_of(directory, 40)
    pair = DedicatedPair(directory)
    one = pair.prefill._models["tiny"].host.num_bytes
    whole = pair.prefill.memory_bytes()
    assert (whole["whole_models"], whole["host_weights"]) == (one, one)
    assert pair.prefill._models.places.models() == ("tiny",), "a model that is loaded comes to a place at once"
    (expected,) = pair.prompt(first_chunk(directory, prompt, 40))
    pair.prefill.add_model(replace(pair.placement, name="other", directory=other.path), nothing)
    assert set(pair.prefill._models.places.models()) == {"tiny", "other"}
    (again,) = pair.prompt(first_chunk(directory, prompt, 40, step_seq=2))
    assert again.token_id == expected.token_id
    pair.prefill.remove_model("other")
    assert pair.prefill._models.places.models() == ("tiny",)
    with pytest.raises(ValueError, match=r"model 'other' is not on rank p0; it has \['tiny'\]"):
        pair.prefill._models["other"]


def test_a_model_larger_than_the_room_is_refused_with_the_numbers(directory):
    with pytest.raises(
        ValueError, match=r"p0: tiny takes .* GiB whole and prefill_pool_bytes is 0.0 GiB; set at least"
    ):
        DedicatedPair(directory, room_bytes=100)


def test_a_row_without_tokens_is_refused(directory):
    step = decode_step({1: 4}, 1)
    step = replace(step, header=step.header._replace(prefill_rank="p0"))
    pair = DedicatedPair(directory)
    with pytest.raises(ValueError, match="sequence 1 brings no tokens; a prefill rank runs prompts only"):
        next(pair.prefill.run(step, LaneLinks({"kv0": pair.rank[0]}, {"kv0": pair.rank[1]})))


def test_models_take_turns_in_the_one_place_that_there_is_room_for(directory, tmp_path):
    other = read_model_dir(write_tiny_model(tmp_path / "other", "qwen3_moe", dtype="bfloat16", tokenizer=False, seed=3))
    prompt = prompt_of(directory, 40)
    pair = DedicatedPair(directory)
    pair.prefill._models.places._room_bytes = pair.prefill._models["tiny"].host.num_bytes
    (expected,) = pair.prompt(first_chunk(directory, prompt, 40))
    pair.prefill.add_model(replace(pair.placement, name="other", directory=other.path), nothing)
    assert pair.prefill._models.places.models() == ("tiny",), "it has to wait for its first prompt"
    pair.prefill._models.bring_next("other")
    assert pair.prefill._models.places.models() == ("other",)
    (found,) = pair.prompt(first_chunk(directory, prompt, 40, step_seq=2))
    assert pair.prefill._models.places.models() == ("tiny",)
    assert found.token_id == expected.token_id


class ArrivesLate(InPlace):
    """A model each of whose groups is in its place no sooner than a chunk waits for it; NaN before."""

    def __init__(self, model, place) -> None:
        super().__init__(in_memory(model, place.memory), {})
        place.memory.fill_(0xFF)
        object.__setattr__(self, "_copy", (model.blob, place.memory))

    def _await(self, group) -> None:
        blob, memory = self._copy
        part = slice(blob.groups[group].start, blob.groups[group].stop)
        memory[part] = blob.memory[part]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss"])
def test_a_chunk_reads_no_weights_that_it_has_not_waited_for(family, tmp_path, monkeypatch):
    directory = model(tmp_path / "tiny", family)
    monkeypatch.setattr(chunk_plan, "PIECE_TOKENS", 16)
    prompt = prompt_of(directory, 40)
    found = []
    for is_late in (False, True):
        pair = DedicatedPair(directory)
        if is_late:
            monkeypatch.setattr(Swapper, "bring", lambda self, model, place: ArrivesLate(model, place))
            pair.prefill._models.places.forget("tiny")
        (token,) = pair.prompt(first_chunk(directory, prompt, 40))
        found.append((token.token_id, pair.kv._frames.arena[1:].clone()))
    (token, arena), (late_token, late_arena) = found
    assert torch.equal(late_arena, arena), "some layer was computed with weights that were still on their way"
    assert late_token == token


class Operations(TorchDispatchMode):
    """Notes torch's kernels while it is entered: by operation and types, as a GPU has them."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not func.is_view and "empty" not in func.__name__:
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            self.found.add((func.__name__, *[tensor.dtype for tensor in tensors]))
        return func(*args, **kwargs)

    def beside(self, half):
        """The half, noted."""
        while True:
            with self:
                try:
                    wait = next(half)
                except StopIteration:
                    return
            yield wait


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_a_chunk_runs_no_kernel_of_torch_that_the_load_has_not_run(family, tmp_path, monkeypatch):
    """On a GPU its first launch would load it, which may wait until the kernel of the home, which waits, has ended."""
    directory = model(tmp_path / "tiny", family)
    pair = DedicatedPair(directory)
    monkeypatch.setattr(chunk_warm_up, "PADDED_ROWS", (16,))
    monkeypatch.setattr(chunk_warm_up, "SPAN_SIZES", SimpleNamespace(rows=(16,), keys=(64,)))
    monkeypatch.setattr(chunk_warm_up, "_expand_all", lambda *_: None)
    monkeypatch.setattr(prefill_models, "capture_spans", lambda *_: {})
    streams = SimpleNamespace(by_share={False: SimpleNamespace(synchronize=lambda: None)})
    lanes = SimpleNamespace(prefill_streams=lambda: streams, capture_streams=streams)
    loaded, worker, own = Operations(), pair.prefill, pair.prefill._models["tiny"]
    with loaded:
        prefill_models.warm_up(worker._kernels, worker._site, own.host, own.geometry, lanes)
    run, seen = worker.run, Operations()
    monkeypatch.setattr(worker, "run", lambda *step: seen.beside(run(*step)))
    assert pair.prompt(first_chunk(directory, prompt_of(directory, 40), 40))
    assert seen.found
    assert seen.found <= loaded.found
