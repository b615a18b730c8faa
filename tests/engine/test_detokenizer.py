"""Incremental text equals text at once, and nothing past a stop string is ever released."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from crosspool.engine.detokenizer import Detokenizer, StopStrings
from tests.support.word_tokenizer import word_tokenizer

A05_LINE = "Repeat this line only: žluťoučký 🧑🏽‍🚀🇺🇳 မြို့ 𠮷野家 ﷽ \u200d"
UNKNOWN_ID = 10**6


def byte_level_tokenizer() -> Tokenizer:
    """Characters outside ASCII are split over several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([A05_LINE, "the quick brown fox repeats the line and the others"] * 4, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama's: words begin with a mark, unknown characters become byte tokens, a leading space is stripped."""
    vocab = {"<unk>": 0, "▁the": 1, "▁fox": 2, "s": 3, "▁": 4, "é": 5}
    vocab |= {f"<0x{byte:02X}>": 6 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()


def streamed(tokenizer: Tokenizer, ids, **options) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    pieces = []
    for token_id in ids:
        piece = detokenizer.feed(token_id)
        pieces.append(piece.text)
        if piece.stop is not None:
            return pieces
    return [*pieces, detokenizer.finish().text]


def test_a05_characters_split_over_tokens_come_whole():
    ids = BYTE_LEVEL.encode(A05_LINE).ids
    assert len(ids) > len(A05_LINE) / 2
    pieces = streamed(BYTE_LEVEL, ids)
    assert "".join(pieces) == A05_LINE
    assert not any("\ufffd" in piece for piece in pieces)


def test_a05_two_thousand_random_lists_decode_as_all_at_once():
    rng = random.Random(5)
    vocab_size = BYTE_LEVEL.get_vocab_size()
    for _ in range(2000):
        ids = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 40))]
        assert "".join(streamed(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


def test_byte_fallback_tokens_come_whole_and_the_first_space_is_stripped_once():
    euro = [6 + byte for byte in "€".encode()]
    ids = [1, 2, 3, 4, *euro, 2, 5]
    assert streamed(BYTE_FALLBACK, ids) == ["the", " fox", "s", " ", "", "", "€", " fox", "é", ""]


def test_a05_a_character_cut_by_the_end_is_the_same_mark_as_at_once():
    ids = BYTE_LEVEL.encode("ab 漢").ids[:-1]
    assert "".join(streamed(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)
    assert BYTE_LEVEL.decode(ids).endswith("\ufffd")


def test_a47_an_id_that_the_tokenizer_has_not_decodes_to_nothing():
    ids = BYTE_LEVEL.encode("the fox").ids
    with_unknown = [UNKNOWN_ID, *ids[:1], UNKNOWN_ID, UNKNOWN_ID, *ids[1:], UNKNOWN_ID]
    assert "".join(streamed(BYTE_LEVEL, with_unknown)) == "the fox"


def test_special_tokens_are_left_out_unless_asked_for():
    [end] = BYTE_LEVEL.encode("<end>").ids
    ids = [*BYTE_LEVEL.encode("fox").ids, end, *BYTE_LEVEL.encode(" fox").ids]
    assert "".join(streamed(BYTE_LEVEL, ids)) == "fox fox"
    assert "".join(streamed(BYTE_LEVEL, ids, skip_special_tokens=False)) == "fox<end> fox"


MONTHS = " September October November December"
A08_CASES = [
    (["pte"], " Se", "pte"),
    (["ber Oct"], " Septem", "ber Oct"),
    ([" October November"], " September", " October November"),
    (["zzz", "ber"], " Septem", "ber"),
    (["zzz"], MONTHS, None),
    ([], MONTHS, None),
]


@pytest.mark.parametrize(("stop", "want", "matched"), A08_CASES)
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 11, 100])
def test_a08_stop_strings_inside_and_across_tokens(stop, want, matched, include, size):
    stops = StopStrings(stop, include=include)
    sent, found = "", None
    for start in range(0, len(MONTHS), size):
        text, found = stops.feed(MONTHS[start : start + size])
        sent += text
        assert matched is None or len(sent) <= len(want + matched * include), "a later character was sent"
        if found is not None:
            break
    else:
        sent += stops.flush()
    assert found == matched
    assert sent == want + (matched or "") * include


@given(
    text=st.text("ab", max_size=30),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    include=st.booleans(),
)
def test_how_the_text_is_cut_into_tokens_does_not_matter(text, stop, cuts, include):
    def run(pieces):
        stops = StopStrings(stop, include=include)
        sent = ""
        for piece in pieces:
            released, found = stops.feed(piece)
            sent += released
            if found is not None:
                return sent, found
        return sent + stops.flush(), None

    bounds = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    sent, found = run(pieces)
    assert (sent, found) == run(list(text)) == run([text] if text else [])
    ends = [text.index(s) + len(s) for s in stop if s in text]
    if not ends:
        assert (sent, found) == (text, None)
    else:
        assert len(sent) == min(ends) - (0 if include else len(found))
        assert text.startswith(sent)


def test_text_is_held_back_only_while_it_may_become_a_stop_string():
    stops = StopStrings(["</think>"])
    assert stops.feed("a</th") == ("a", None)
    assert stops.holds_back
    assert stops.feed("e") == ("</the", None)
    assert not stops.holds_back


def test_below_min_tokens_a_stop_string_is_ordinary_text():
    tokenizer = word_tokenizer(10)
    assert "".join(streamed(tokenizer, [1, 2, 1, 2, 3], stop=["w2"], min_tokens=3)) == "w1w2w1"
    assert "".join(streamed(tokenizer, [1, 2, 3], stop=["w2"])) == "w1"
    assert "".join(streamed(tokenizer, [1, 2, 3], stop=["2w3"], min_tokens=3)) == "w1w"


def test_a_stop_string_in_text_that_only_the_end_completes_is_found():
    ids = BYTE_LEVEL.encode("ab 漢").ids[:-1]
    detokenizer = Detokenizer(BYTE_LEVEL, stop=["\ufffd"])
    text = "".join(detokenizer.feed(token_id).text for token_id in ids)
    last = detokenizer.finish()
    assert (text + last.text, last.stop) == ("ab ", "\ufffd")
