"""A tiny byte-level tokenizer with a chat template: ids 0-4 are special, then the 256 bytes, then a few merges."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, END_OF_TURN, "<|system|>", "<|user|>", "<|assistant|>")  # ids 0, 1, 2, ...
MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("Ġ", "the"), ("a", "n"), ("Ġ", "a"), ("o", "n"))

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"
)


def write_tiny_tokenizer(path: Path, *, vocab_size: int = 512, eos_token: str = END_OF_TEXT) -> None:
    """Write tokenizer.json and tokenizer_config.json. Vocabularies below 261 + merges get fewer merges.

    Raises ValueError where even the bytes do not fit into `vocab_size`.
    """
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if len(tokens) > vocab_size:
        raise ValueError(f"vocab_size is {vocab_size}; the tiny tokenizer needs at least {len(tokens)}")
    merges = list(MERGES)[: vocab_size - len(tokens)]
    tokens += [left + right for left, right in merges]
    vocabulary = {token: idx for idx, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos_token,
        "bos_token": None,
        "pad_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
