"""Prompts as text of a wanted number of tokens."""

from __future__ import annotations

import random

import pytest

from crosspool.bench.target import Target, read_tokenizer, some_words, text_of
from crosspool.bench.traffic import PlannedRequest
from crosspool.demo.scenario import demo_model_dirs

DIRECTORY = demo_model_dirs()["austen"]


def body(num, **fields):
    planned = PlannedRequest(index=3, due_s=0.0, model="m", prompt_tokens=num, output_tokens=2)
    return Target(base_url="http://x", **fields).body(planned)


@pytest.mark.parametrize("num", [1, 2, 17, 300])
def test_a_text_has_the_tokens_asked_for(num):
    tokenizer = read_tokenizer(DIRECTORY)
    text = text_of(tokenizer, random.Random(1), num)
    assert len(tokenizer.encode(text, add_special_tokens=False)) == pytest.approx(num, abs=1)  # the cut may join
    words = some_words(random.Random(1), num)
    assert text.startswith(words) or words.startswith(text), "of the words that are sent without a tokenizer"


def test_chats_get_text_and_completions_ids_of_the_whole_vocabulary():
    chat = {"endpoint": "/v1/chat/completions"}
    plain = body(300, **chat)["messages"][0]["content"]
    counted = body(300, tokenizer=DIRECTORY, **chat)["messages"][0]["content"]
    tokenizer = read_tokenizer(DIRECTORY)
    assert len(plain.split()) == 300
    assert len(tokenizer.encode(plain)) != pytest.approx(300, abs=5)
    assert len(tokenizer.encode(counted)) == pytest.approx(300, abs=1)
    assert counted == body(300, tokenizer=DIRECTORY, **chat)["messages"][0]["content"], "the same seed, the same text"
    assert max(body(3000)["prompt"]) < 1000 < max(body(3000, tokenizer=DIRECTORY)["prompt"])
    assert max(body(3000, tokenizer=DIRECTORY)["prompt"]) < tokenizer.get_vocab_size()


def test_what_is_no_tokenizer_is_refused_before_anything_is_sent(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ValueError, match="cannot be read"):
            Target(base_url="http://x", tokenizer=path)
