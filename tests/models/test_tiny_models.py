"""The writer of tiny models that other tests stand on: repeatable, and real to transformers."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from crosspool.models.families.registry import FAMILIES
from tests.support.tiny_models import write_tiny_model
from tests.support.tiny_tokenizer import END_OF_TURN, write_tiny_tokenizer


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_the_same_arguments_give_the_same_bytes(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_tiny_model(tmp_path / name, "glm4_moe_lite", seed=seed, dtype="bfloat16", num_shards=2)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a") != contents(tmp_path / "c")


def test_the_tokenizer_round_trips_any_text(tmp_path):
    write_tiny_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "the héron on 'then' \U0001f426\n\t end"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < 512
    assert tokenizer.encode("a" + END_OF_TURN).ids[-1] == 1
    with pytest.raises(ValueError, match="vocab_size is 200"):
        write_tiny_tokenizer(tmp_path, vocab_size=200)


@pytest.mark.judge
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_transformers_loads_them_whole(tmp_path, family, fused):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = write_tiny_model(tmp_path, family, fused=fused, num_shards=3)
    _, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|user|>\nhello<|end|>\n<|assistant|>\n"
    assert tokenizer.eos_token_id == 0
