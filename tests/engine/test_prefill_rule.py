"""Which tokens share a prefill step, and that nobody waits for ever."""

from hypothesis import given
from hypothesis import strategies as st

from crosspool.core import Request, SamplingParams
from crosspool.engine.prefill_chunks import Chunk, prefill_chunks
from crosspool.engine.prefill_rule import PrefillRule
from crosspool.engine.sequence import Sequence
from crosspool.kv_pool.block_table import BlockTable


def a_sequence(sequence_id: int, prompt: int, outputs: int = 0) -> Sequence:
    request = Request(
        request_id=str(sequence_id),
        model="p",
        prompt_token_ids=list(range(prompt)),
        sampling=SamplingParams(max_tokens=1000),
        output_token_ids=list(range(1000, 1000 + outputs)),
    )
    return Sequence(sequence_id=sequence_id, request=request, table=BlockTable(4))


def run_all(rule: PrefillRule, sequences: list[Sequence]) -> list[dict[int, tuple[int, int]]]:
    """The steps until all are prefilled: of each, the tokens [start, stop) of its sequences."""
    steps, led = [], None
    while waiting := [sequence for sequence in sequences if sequence.num_uncached_tokens]:
        chunks = rule.chunks(waiting, led)
        oldest = min(sequence.sequence_id for sequence in waiting)
        led = oldest if any(chunk.sequence.sequence_id == oldest for chunk in chunks) else None
        steps.append({})
        for chunk in chunks:
            start = chunk.sequence.num_cached_tokens
            steps[-1][chunk.sequence.sequence_id] = (start, start + chunk.num_tokens)
            chunk.sequence.num_cached_tokens += chunk.num_tokens
        assert len(steps) < 2000
    return steps


shapes = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 90)), min_size=1, max_size=6)


@given(shapes=shapes, max_tokens=st.integers(1, 64))
def test_without_special_rules_steps_are_shared_as_ever(shapes, max_tokens):
    sequences = [a_sequence(number, *shape) for number, shape in enumerate(shapes)]
    chunks = PrefillRule(max_tokens=max_tokens).chunks(sequences, led=0)
    assert chunks == prefill_chunks(sequences, max_tokens)


@given(shapes=shapes, max_tokens=st.integers(8, 64), apart=st.booleans())
def test_generated_tokens_run_again_in_small_steps_without_prompts(shapes, max_tokens, apart):
    sequences = [a_sequence(number, *shape) for number, shape in enumerate(shapes)]
    for step in run_all(PrefillRule(max_tokens=max_tokens, rerun_tokens=8, are_apart=apart), sequences):
        reruns = {number for number, (start, _) in step.items() if start >= shapes[number][0]}
        assert reruns in (set(), set(step))
        if reruns:
            assert sum(stop - start for start, stop in step.values()) <= 8
            assert not apart or all(stop - start == 1 for start, stop in step.values())
        else:
            assert all(stop <= shapes[number][0] for number, (_, stop) in step.items())


@given(shapes=shapes, max_tokens=st.integers(1, 64))
def test_prompts_apart_are_cut_as_if_nothing_ran_beside_them(shapes, max_tokens):
    rule = PrefillRule(max_tokens=max_tokens, rerun_tokens=8, are_apart=True)
    together = run_all(rule, [a_sequence(number, *shape) for number, shape in enumerate(shapes)])
    for number, shape in enumerate(shapes):
        alone = run_all(rule, [a_sequence(number, *shape)])
        cuts = [[step[number] for step in steps if number in step] for steps in (together, alone)]
        first, second = ([cut for cut in each if cut[0] < shape[0]] for each in cuts)
        assert first == second


def test_a_long_prompt_apart_gives_every_second_step_to_short_ones():
    rule = PrefillRule(max_tokens=100, are_apart=True)
    steps = run_all(rule, [a_sequence(0, 1000), a_sequence(1, 150), a_sequence(2, 20)])
    assert [list(step) for step in steps] == [[0], [2], [0], [1], [0], [1], *[[0]] * 7]


def test_generated_tokens_of_prompts_apart_run_again_one_of_each_sequence_a_step():
    sequences = [a_sequence(number, 3, outputs=2) for number in range(4)]
    for sequence in sequences:
        sequence.num_cached_tokens = 3
    rule = PrefillRule(max_tokens=100, rerun_tokens=3, are_apart=True)
    assert rule.chunks(sequences) == [Chunk(sequence, 1) for sequence in sequences[:3]]
    beside_a_prompt = rule.chunks([*sequences, a_sequence(9, 40)], led=0)
    assert [chunk.sequence.sequence_id for chunk in beside_a_prompt] == [9]
