"""The bound on a text's tokens that is known before tokenizing: never above the truth, and near enough to be of use."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from crosspool.server.token_bound import TokenBound
from crosspool.server.tokenizer import PIECE, TextTokenizer, TooLongError
from tests.support.tiny_tokenizer import write_tiny_tokenizer

ALPHABET = "aeo  \n\t.,'12Zé̂ा각ᄀ\u1161\u11a8𠮷\u200dﬁ"


def byte_level(normalizer: Any = None) -> dict[str, Any]:
    """A tokenizer whose longest tokens are long: trained on few words."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    if normalizer is not None:
        raw.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    raw.train_from_iterator(["incomprehensibilities unimaginatively ..........  각각각 ééé"] * 50, trainer)
    described: dict[str, Any] = json.loads(raw.to_str())
    return described


@pytest.mark.parametrize(
    "normalizer", [None, normalizers.NFC(), normalizers.NFKC(), normalizers.Sequence([normalizers.NFD()])]
)
def test_the_bound_is_never_above_the_number_of_tokens(normalizer: Any) -> None:
    described = byte_level(normalizer)
    tokenizer, bound = Tokenizer.from_str(json.dumps(described)), TokenBound(described)
    draw = random.Random(7)
    words = ["incomprehensibilities", "..........", "각각각", "e\u0301\u0302", "\u1100\u1161\u11a8" * 9]
    for _ in range(300):
        text = "".join(
            draw.choice([draw.choice(words), *draw.choices(ALPHABET, k=6)]) for _ in range(draw.randint(0, 60))
        )
        assert bound.least_tokens([text]) <= len(tokenizer.encode(text, add_special_tokens=False).ids), text
    long = "incomprehensibilities" * 100
    assert bound.least_tokens([long, "  \n"]) >= 50
    assert bound.least_tokens([" " * 1000]) == 0  # a template may trim it


def test_composed_characters_count_as_one() -> None:
    """Where tokens are made of characters, one may cover as many as Unicode composes to it, each of several."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"각": 256, "각" * 2: 257, "각" * 4: 258, "각" * 8: 259}
    merges = [("각", "각"), ("각" * 2, "각" * 2), ("각" * 4, "각" * 4)]
    raw = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace()])
    bound = TokenBound(json.loads(raw.to_str()))
    text = "\u1100\u1161\u11a8" * 400
    assert 0 < bound.least_tokens([text]) <= len(raw.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "WordPiece"}},
        {"normalizer": {"type": "StripAccents"}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "abc"}, "content": ""}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "."}, "content": "x"}},
        {"pre_tokenizer": {"type": "Split", "behavior": "Removed", "pattern": {"Regex": "a"}}},
        {"pre_tokenizer": {"type": "Metaspace"}},  # an alphabet without bytes: unknown characters become one
    ],
)
def test_tokenizers_that_may_drop_characters_have_no_bound(change: dict[str, Any]) -> None:
    described = byte_level()
    for key, value in change.items():
        described[key] = {**described[key], **value} if key == "model" else value
    if change.get("pre_tokenizer", {}).get("type") == "Split":
        described["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [change["pre_tokenizer"], {"type": "ByteLevel"}],
        }
    assert TokenBound(described).least_tokens(["incomprehensibilities" * 100]) == 0


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    write_tiny_tokenizer(tmp_path)
    return TextTokenizer.from_directory(tmp_path)


def test_a_text_far_above_its_limit_is_told_by_its_beginning(tokenizer: TextTokenizer) -> None:
    text = "the end " * 100_000
    with pytest.raises(TooLongError, match=rf"800000 characters, the first {PIECE} of which are \d+ tokens"):
        tokenizer.encode(text, limit=100)
    with pytest.raises(TooLongError):
        tokenizer.encode_plain(text, limit=100)
    assert tokenizer.encode(text, limit=10_000_000) == tokenizer.encode(text)


def test_a_tokenizer_that_cuts_or_fills_up_is_told_not_to() -> None:
    raw = Tokenizer.from_str(json.dumps(byte_level()))
    raw.enable_truncation(max_length=4)
    raw.enable_padding(length=64)
    assert len(TextTokenizer(raw.to_str()).encode("one two three four five six")) > 4
    assert len(TextTokenizer(raw.to_str()).encode("one")) < 64
