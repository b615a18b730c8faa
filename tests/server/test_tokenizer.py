"""Text and ids: exact token bytes, ids the tokenizer has not, special tokens, begin tokens."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers

import crosspool
from crosspool.config import DeploymentConfig, ModelConfig
from crosspool.deployment.prepared_model import demo_models, prepare_model
from crosspool.errors import CheckpointError
from crosspool.server.tokenizer import TextTokenizer
from tests.support.tiny_models import write_tiny_model
from tests.support.tiny_tokenizer import END_OF_TEXT, write_tiny_tokenizer

DEMO = Path(crosspool.__file__).parent / "demo_models"
TEXT = "žluťoučký 🧑🏽‍🚀🇺🇳 မြို့ 𠮷野家 ﷽ \u200d the end"


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    write_tiny_tokenizer(tmp_path)
    return TextTokenizer.from_directory(tmp_path)


def test_token_bytes_join_to_the_text(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == TEXT.encode()
    assert tokenizer.decode(ids) == TEXT
    assert "\ufffd" in tokenizer.token_text(tokenizer.encode("é")[0])  # half a character


@pytest.mark.parametrize("decoder", ["metaspace", "byte fallback"])
def test_token_bytes_of_sentencepiece_styles(decoder: str) -> None:
    from tokenizers import decoders, models, pre_tokenizers

    vocabulary = {"<0xE2>": 0, "▁hello": 1, "!": 2, "▁": 3}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer = TextTokenizer(raw.to_str())
    expected = {"metaspace": [(1, b" hello"), (3, b" "), (2, b"!")], "byte fallback": [(0, b"\xe2")]}
    for token, data in expected[decoder]:
        assert tokenizer.token_bytes(token) == data


def test_ids_beyond_the_tokenizer_decode_to_nothing(tokenizer: TextTokenizer) -> None:
    known = tokenizer.encode("ab")
    padded = [known[0], tokenizer.size, 10**9, -1, known[1]]
    assert tokenizer.decode(padded) == "ab"
    assert tokenizer.token_bytes(tokenizer.size) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.token_text(10**9) == ""


def test_special_tokens_are_read_or_plain(tokenizer: TextTokenizer) -> None:
    assert tokenizer.encode(END_OF_TEXT) == [0]
    plain = tokenizer.encode_plain(END_OF_TEXT)
    assert 0 not in plain
    assert tokenizer.decode(plain) == END_OF_TEXT
    assert tokenizer.decode([0, *plain]) == END_OF_TEXT
    assert tokenizer.decode([0], skip_special_tokens=False) == END_OF_TEXT


def test_a_begin_token_is_never_doubled(tmp_path: Path) -> None:
    from tokenizers import processors

    write_tiny_tokenizer(tmp_path)
    raw = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    raw.post_processor = processors.TemplateProcessing(single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)])
    tokenizer = TextTokenizer(raw.to_str(), END_OF_TEXT)
    assert tokenizer.encode("hi")[0] == 0
    assert tokenizer.encode("hi", add_special_tokens=False)[0] != 0
    assert tokenizer.encode(f"{END_OF_TEXT}hi") == tokenizer.encode("hi")
    assert tokenizer.encode(f"{END_OF_TEXT}{END_OF_TEXT}hi").count(0) == 2  # the client's own second one stays


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"a sentencepiece model alone")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*tokenizer\.model.*save_pretrained"):
        TextTokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        TextTokenizer.from_directory(tmp_path)
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        TextTokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("plain", [False, True])
def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: TextTokenizer, plain: bool) -> None:
    encode = tokenizer.encode_plain if plain else tokenizer.encode
    thread = threading.Thread(target=encode, args=("the end " * 100_000,))
    turns = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 5, "the event loop would have stood still"


def _awkward() -> Tokenizer:
    """Added tokens of every kind: special or not, within the vocabulary, before and behind white space, normalized."""
    raw = Tokenizer.from_file(str(DEMO / "holmes" / "tokenizer.json"))
    raw.normalizer = normalizers.Lowercase()
    raw.add_special_tokens([AddedToken("<think>", lstrip=True), AddedToken("w", single_word=True)])
    raw.add_tokens([AddedToken("<CALL>", normalized=True, rstrip=True), AddedToken("e")])
    return raw


def _plain() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "austen" / "tokenizer.json"))


@pytest.mark.parametrize("make", [_awkward, _plain])
def test_a_text_is_plain_as_in_a_tokenizer_that_is_read_anew(make: Callable[[], Tokenizer]) -> None:
    raw = make()
    anew = Tokenizer.from_str(raw.to_str())
    anew.encode_special_tokens = True
    tokenizer = TextTokenizer(raw.to_str(), tokenizer=raw)
    for text in (TEXT, "a  <think>\n<CALL> we were, <|user|> w <call> e", "<|endoftext|>", "", "\u0130\u1e9e"):
        assert tokenizer.encode_plain(text) == anew.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == make().encode(text, add_special_tokens=False).ids


def test_a_tokenizer_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads, and with them every stream, stand still while one is read."""
    home = write_tiny_model(tmp_path / "m", "qwen3_moe", num_layers=1)
    num_read = 0

    class Counted:
        def __new__(cls, model: Any) -> Any:
            return Tokenizer(model)

        @staticmethod
        def from_str(text: str) -> Tokenizer:
            nonlocal num_read
            num_read += 1
            return Tokenizer.from_str(text)

        @staticmethod
        def from_file(path: str) -> Tokenizer:
            nonlocal num_read
            num_read += 1
            return Tokenizer.from_file(path)

    for module in ("server.tokenizer", "engine.serve_directory"):
        monkeypatch.setattr(f"crosspool.{module}.Tokenizer", Counted)
    prepare_model(ModelConfig(source=str(home), name="m"), DeploymentConfig(models=demo_models()))
    assert num_read == 1
