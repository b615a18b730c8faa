"""Which of several sequences that begin alike fills their pages; what one takes over from others before it starts."""

import pytest

from crosspool.core import Request, SamplingParams
from crosspool.engine.forecast import Reserve
from crosspool.engine.kv_rank_pages import KVRankPages
from crosspool.engine.prefill_chunks import Chunk
from crosspool.engine.prefill_rule import PrefillRule
from crosspool.engine.sequence import Sequence
from crosspool.engine.shared_prefill import shared_chunks
from crosspool.kv_pool.block_table import BlockTable
from tests.support.core_drive import FRAME_BYTES, a_model

PAGE_TOKENS = 8
ALIKE = list(range(40))


class Nothing(Reserve):
    """A forecast that is as low as can be: no sequence is expected to go on."""

    def expected_tokens(self, model: str, num_generated: int, max_tokens: int) -> int:
        return num_generated


class Rank:
    """One KV rank's pages and sequences of one model."""

    def __init__(self, num_frames: int = 100, estimate: Reserve | None = None) -> None:
        self.pages = KVRankPages("kv0", num_frames + 1, FRAME_BYTES, estimate or Reserve(), caches_prefixes=True)
        self.pages.add_model(a_model("p", page_tokens=PAGE_TOKENS))
        self.count = 0

    def admit(self, prompt: list[int], max_tokens: int = 1) -> Sequence:
        self.count += 1
        request = Request(
            request_id=str(self.count),
            model="p",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
        )
        sequence = Sequence(sequence_id=self.count, request=request, table=BlockTable(PAGE_TOKENS))
        assert self.pages.admits(sequence)
        self.pages.admit(sequence)
        return sequence

    def run(self, sequence: Sequence, num_tokens: int) -> None:
        """A step has run so many tokens of it."""
        sequence.joined = True
        sequence.num_cached_tokens += num_tokens
        self.pages.step_ended(sequence)

    def chunks(
        self, waiting: list[Sequence], running: list[Chunk] | None = None, max_tokens: int = 16
    ) -> dict[int, int]:
        """Tokens by the sequence's number."""
        assert self.pages.prefix is not None
        found = shared_chunks(self.pages.prefix, waiting, running or [], PrefillRule(max_tokens=max_tokens).chunks)
        return {chunk.sequence.sequence_id: chunk.num_tokens for chunk in found}


def test_the_oldest_runs_what_several_begin_with_and_the_others_wait():
    rank = Rank()
    alike = [rank.admit(ALIKE) for _ in range(3)]
    other = rank.admit([63, 62, 61])
    assert rank.chunks([*alike, other]) == {1: 13, 4: 3}


@pytest.mark.parametrize(("running", "waits"), [(7, False), (8, True), (20, True)])
def test_a_sequence_waits_only_for_one_that_gets_as_far_with_the_page_that_it_lacks(running, waits):
    rank = Rank()
    first, second = rank.admit(ALIKE), rank.admit([*ALIKE[:20], 5])
    first.joined = True
    assert rank.chunks([second], [Chunk(first, running)]) == ({} if waits else {2: 16})


@pytest.mark.parametrize(("written", "waits"), [(0, True), (8, False)])
def test_a_sequence_does_not_wait_for_one_that_goes_another_way(written, waits):
    """Both have their first page in common. Once that is there, the second needs nothing more of the first."""
    rank = Rank()
    first, second = rank.admit(ALIKE), rank.admit([*ALIKE[:8], *range(50, 62)])
    rank.run(first, written)
    assert rank.chunks([second], [Chunk(first, 16)]) == ({} if waits else {2: 12})
    assert second.num_cached_tokens == written


def test_one_that_has_started_goes_on_beside_its_like():
    rank = Rank()
    first, second = rank.admit(ALIKE), rank.admit(ALIKE)
    rank.run(second, 8)
    first.joined = True
    assert rank.chunks([second], [Chunk(first, 16)]) == {2: 16}


def test_a_page_whose_last_token_has_to_be_run_is_not_waited_for():
    rank = Rank()
    first, second = rank.admit(ALIKE[:8]), rank.admit(ALIKE[:8])
    assert rank.chunks([first, second]) == {1: 8, 2: 8}


def test_pages_filled_since_admission_are_taken_over_and_its_own_go_back():
    rank = Rank()
    first, second = rank.admit(ALIKE, 20), rank.admit(ALIKE, 20)
    before = rank.pages.pool.num_free
    rank.run(first, 24)
    assert rank.chunks([second], [Chunk(first, 16)]) == {}
    assert second.num_cached_tokens == 24
    assert second.table.pages[:3] == first.table.pages[:3]
    assert rank.pages.pool.num_free == before + 3
    claims = rank.pages.budget.claims
    assert (claims[1].held, claims[2].held) == (2, 2)
    assert sum(claim.held for claim in claims.values() if claim.is_shared) == 3
    rank.pages.release(first)
    assert (claims[2].held, claims[2].most) == (5, 8)
    rank.pages.release(second)
    assert rank.pages.pool.num_free + rank.pages.prefix.num_reusable == rank.pages.pool.budget
    assert not claims


def test_pages_of_one_that_has_ended_meanwhile_are_taken_over_as_its_own():
    rank = Rank()
    first, second = rank.admit(ALIKE), rank.admit(ALIKE)
    rank.run(first, 40)
    shared = first.table.pages[:4]
    rank.pages.release(first)
    assert rank.chunks([second]) == {2: 8}
    assert second.table.pages[:4] == shared
    assert rank.pages.budget.claims[2].held == 5
    assert rank.pages.prefix.num_reusable == 1


def test_what_would_leave_a_third_one_without_pages_is_not_taken_over():
    """Shared pages come back only with the last that uses them, which the budget does not count on."""
    rank = Rank(num_frames=10, estimate=Nothing())
    first, second = rank.admit(ALIKE[:32], 8), rank.admit(ALIKE[:32], 8)
    rank.admit([63] * 8, 72)
    rank.run(first, 32)
    assert rank.chunks([second], max_tokens=64) == {2: 32}
    assert second.num_cached_tokens == 0
    assert rank.pages.budget.is_safe
    assert [rank.pages.budget.claims[key].held for key in (1, 2, 3)] == [4, 4, 1]


def test_of_two_pages_with_the_same_tokens_one_is_known_and_stays_as_young_as_both():
    rank = Rank()
    first, second = rank.admit(ALIKE), rank.admit([*ALIKE[:16], *range(50, 60)])
    rank.run(first, 16)
    rank.run(second, 24)
    prefix = rank.pages.prefix
    assert [cached is None for cached in second.prefix.filled] == [True, True, False]
    keys = list(second.prefix.chain.keys)
    rank.pages.release(first)
    free = rank.pages.pool.num_free
    rank.pages.release(second)
    assert rank.pages.pool.num_free == free + 3  # its two twins and the page that was not full
    order = []
    while (oldest := prefix.cache.oldest(["p"])) is not None:
        order.append(oldest.key)
        prefix.cache.evict(oldest)
    assert order == keys[::-1]


def test_a_page_whose_twin_has_gone_meanwhile_is_known_from_then_on():
    rank = Rank()
    first, second = rank.admit(ALIKE), rank.admit(ALIKE)
    rank.run(first, 16)
    rank.run(second, 16)
    rank.pages.release(first)
    assert rank.pages.prefix.drop_unused("p") == 2
    rank.pages.release(second)
    assert rank.pages.prefix.num_reusable == 2
    assert rank.admit(ALIKE).num_cached_tokens == 16


def test_sequences_of_the_same_prompt_have_its_keys_made_once_and_those_of_their_answers_apart():
    rank = Rank()
    first, second, other = rank.admit(ALIKE, 9), rank.admit(list(ALIKE), 9), rank.admit([*ALIKE[:-1], 0], 9)
    for sequence, token_id in ((first, 1), (second, 2), (other, 1)):
        rank.run(sequence, 40)
        sequence.request.output_token_ids += [token_id] * 8
        assert rank.pages.ensure_slot(sequence)
        rank.run(sequence, 8)
    chains = [sequence.prefix.chain.keys for sequence in (first, second, other)]
    assert chains[0][0] is chains[1][0]
    assert chains[0][0] is not chains[2][0]
    assert chains[0][:5] == chains[1][:5]
    assert chains[0][:4] == chains[2][:4]
    assert len({keys[4] for keys in chains}) == 2
    assert len({keys[5] for keys in chains}) == 3


class Sixteen(Reserve):
    def expected_tokens(self, model: str, num_generated: int, max_tokens: int) -> int:
        return 16


def test_a_forecast_counts_shared_pages_out_when_a_sequence_grows_too():
    rank = Rank(estimate=Sixteen())
    first = rank.admit(ALIKE, 40)
    rank.run(first, 40)
    second = rank.admit(ALIKE, 40)
    assert second.num_cached_tokens == 32
    rank.run(second, 8)
    for sequence in (first, second):
        assert rank.pages.ensure_slot(sequence)
    assert len(second.table.pages) == 6
    claim = rank.pages.budget.claims[2]
    assert (claim.held, claim.expected, claim.most) == (2, 3, 6)  # of 6, 7 and 10 pages 4 are shared
