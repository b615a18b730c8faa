"""How sequences share the tokens of a step of prefill."""

from hypothesis import given
from hypothesis import strategies as st

from crosspool.core import Request, SamplingParams
from crosspool.engine.prefill_chunks import prefill_chunks
from crosspool.engine.sequence import Sequence
from crosspool.kv_pool.block_table import BlockTable


def a_sequence(sequence_id: int, prompt: int, outputs: int = 0, cached: int = 0) -> Sequence:
    request = Request(
        request_id=str(sequence_id),
        model="p",
        prompt_token_ids=list(range(prompt)),
        sampling=SamplingParams(max_tokens=100),
        output_token_ids=list(range(1000, 1000 + outputs)),
    )
    return Sequence(sequence_id=sequence_id, request=request, table=BlockTable(4), num_cached_tokens=cached)


@given(lengths=st.lists(st.integers(1, 50), max_size=8), max_tokens=st.integers(1, 40))
def test_chunks_use_the_whole_budget_and_give_the_oldest_half(lengths, max_tokens):
    sequences = [a_sequence(index, length) for index, length in enumerate(lengths)]
    chunks = prefill_chunks(reversed(sequences), max_tokens)
    assert sum(chunk.num_tokens for chunk in chunks) == min(max_tokens, sum(lengths))
    assert all(1 <= chunk.num_tokens <= chunk.sequence.num_uncached_tokens for chunk in chunks)
    assert [chunk.sequence.sequence_id for chunk in chunks] == sorted(c.sequence.sequence_id for c in chunks)
    if sequences:
        assert chunks[0].sequence is sequences[0]
        assert chunks[0].num_tokens >= min(lengths[0], max(1, max_tokens // 2))


def test_short_prompts_share_a_chunk_with_a_long_one():
    chunks = prefill_chunks([a_sequence(0, 500), a_sequence(1, 40), a_sequence(2, 6), a_sequence(3, 5)], 32)
    assert {chunk.sequence.sequence_id: chunk.num_tokens for chunk in chunks} == {0: 16, 1: 5, 2: 6, 3: 5}
    assert [chunk.sequence.sequence_id for chunk in chunks if chunk.is_last] == [2, 3]


def test_a_sequence_that_lost_its_kv_prefills_prompt_and_outputs():
    sequence = a_sequence(0, prompt=5, outputs=4)
    assert sequence.num_uncached_tokens == 9
    assert sequence.uncached(9) == (0, 1, 2, 3, 4, 1000, 1001, 1002, 1003)
    sequence.num_cached_tokens = 3
    assert sequence.uncached(4) == (3, 4, 1000, 1001)
    sequence.num_cached_tokens = 7
    assert sequence.uncached(2) == (1002, 1003)
