"""Prompts as text of a wanted number of tokens, for endpoints that take no token ids."""

import random
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

WORDS = ("the", "sea", "was", "calm", "and", "ship", "went", "on", "under", "stars", "a", "captain", "looked", "at")


@lru_cache(maxsize=8)
def read_tokenizer(path: Path) -> Tokenizer:
    """A `tokenizer.json`, or the one of a model directory. Raises ValueError where there is none."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for missing and for damaged files
        raise ValueError(f"--tokenizer is {path}, and {file} cannot be read: {error}; give a model directory") from None


def some_words(rng: random.Random, num: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num))


def text_of(tokenizer: Tokenizer, rng: random.Random, num_tokens: int) -> str:
    """Common words, cut after so many tokens; a chat template comes on top of them."""
    text = some_words(rng, num_tokens)
    while len(encoding := tokenizer.encode(text, add_special_tokens=False)) < num_tokens:
        text = f"{text} {some_words(rng, num_tokens)}"
    return text[: encoding.offsets[num_tokens - 1][1]]
