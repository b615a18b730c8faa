"""How many tokens a text has at least, known before it is tokenized: no token covers more than the longest one does.

Only what certainly becomes part of a token counts: white space does not, since templates trim it and some tokenizers
drop it. For a tokenizer that may drop or merge other characters too there is no such bound.
"""

from collections.abc import Sequence
from typing import Any

WHITE_SPACE = " \n\t\r\v\f"
COMPOSED = 4
"""Characters that Unicode's composition (NFC, NFKC) makes one of at most."""
KEEPS_CHARACTERS = frozenset({"Prepend", "Strip", "Lowercase", "NFC", "NFD", "NFKC", "NFKD"})
SPLITS_ONLY = frozenset({"ByteLevel", "Metaspace", "Digits", "Whitespace", "WhitespaceSplit", "BertPreTokenizer"})


class TokenBound:
    """The bound of one tokenizer, given as its parsed tokenizer.json."""

    def __init__(self, described: dict[str, Any]) -> None:
        self._longest = _longest_token(described) if _keeps_all(described) else None

    def least_tokens(self, texts: Sequence[str]) -> int:
        """A number of tokens that a prompt which holds all of `texts` reaches or exceeds; 0 where none is known."""
        if self._longest is None:
            return 0
        num_ascii = num_other = 0
        for text in texts:
            shown = text.strip()
            count = len(shown) - sum(shown.count(blank) for blank in WHITE_SPACE)
            if shown.isascii():
                num_ascii += count
            else:
                num_other += count
        return -(-(num_ascii + num_other // COMPOSED) // self._longest)


def _longest_token(described: dict[str, Any]) -> int:
    """Characters that one token covers at most; a byte-level token has one character a byte."""
    vocab = described["model"]["vocab"]
    pieces = vocab if isinstance(vocab, dict) else [piece for piece, _ in vocab]
    added = [token["content"] for token in described.get("added_tokens") or ()]
    return max(map(len, (*pieces, *added)), default=1)


def _keeps_all(described: dict[str, Any]) -> bool:
    """Whether every character but white space certainly ends up in a token, none in two unknown ones made one."""
    model = described["model"]
    splitters = list(_parts(described.get("pre_tokenizer"), "pretokenizers"))
    has_bytes = "ByteLevel" in [part["type"] for part in splitters] or bool(model.get("byte_fallback"))
    return (
        model.get("type") in ("BPE", "Unigram")
        and has_bytes
        and all(_keeps_characters(part) for part in _parts(described.get("normalizer"), "normalizers"))
        and all(_splits_only(part) for part in splitters)
    )


def _parts(described: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, sequences opened."""
    if described is None:
        return []
    if described["type"] != "Sequence":
        return [described]
    return [found for part in described[name] for found in _parts(part, name)]


def _keeps_characters(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return isinstance(pattern, str) and (not pattern.strip() or len(pattern) <= len(normalizer["content"]))
    return normalizer["type"] in KEEPS_CHARACTERS


def _splits_only(pre_tokenizer: dict[str, Any]) -> bool:
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return str(pre_tokenizer["behavior"]) != "Removed"
    return pre_tokenizer["type"] in SPLITS_ONLY
