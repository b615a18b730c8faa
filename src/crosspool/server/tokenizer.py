"""Text to token ids and back for one model, on the `tokenizers` library."""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from crosspool.errors import CheckpointError, unreadable_because
from crosspool.server.token_bound import TokenBound

LONG_TEXT = 4096
"""Characters from which encoding is worth a thread of its own."""

PIECE = 1 << 15
"""Characters that are encoded at once where it is to be seen whether a text is far too long."""

LONG_FOR_ITS_LIMIT = 8
"""Characters a token of the limit from which that is looked at; ordinary text has four or so."""


class TooLongError(ValueError):
    """A text has far more tokens than its limit, told without encoding all of it."""


class TextTokenizer:
    """One model's tokenizer. Thread-safe: nothing here changes after construction.

    Ids beyond the tokenizer (an output layer padded wider than the vocabulary) decode to nothing.
    """

    def __init__(self, serialized: str, bos_token: str | None = None, tokenizer: Tokenizer | None = None) -> None:
        """tokenizer: the same, read already."""
        self._tokenizer = tokenizer or Tokenizer.from_str(serialized)
        # A twin that reads special tokens in text as plain text: for what users write inside chat messages.
        self._plain = _twin(self._tokenizer)
        self._plain.encode_special_tokens = True
        described = json.loads(serialized)
        added = described.get("added_tokens") or []
        for each in (self._tokenizer, self._plain):  # a prompt is never cut or filled up in silence
            each.no_truncation()
            each.no_padding()
        self.bound = TokenBound(described)
        self.special_tokens: dict[str, int] = {
            token["content"]: token["id"] for token in added if token.get("special") and token["content"]
        }
        self._added: dict[int, str] = {token["id"]: token["content"] for token in added}
        self._byte_level = "ByteLevel" in json.dumps(described.get("decoder"))
        self.bos_token = bos_token
        self.bos_token_id = self._tokenizer.token_to_id(bos_token) if bos_token else None

    @classmethod
    def from_directory(cls, directory: Path, tokenizer: Tokenizer | None = None) -> "TextTokenizer":
        """The tokenizer of a Hugging Face directory, as `tokenizer` where it has been read already.

        Raises CheckpointError where it cannot be read.
        """
        path = directory / "tokenizer.json"
        try:
            serialized = path.read_text(encoding="utf-8")
        except OSError as error:
            raise CheckpointError(
                f"cannot read {path}: {error.strerror}; of other tokenizers (tokenizer.model, vocab.json) transformers "
                "makes one: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            ) from None
        try:
            return cls(serialized, special_token(tokenizer_config(directory), "bos_token"), tokenizer)
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{path} is not a tokenizer this version of tokenizers reads: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """Ids of `text`; special tokens written in it are read as such.

        With `add_special_tokens` the tokenizer adds its own, but never a second begin token: text that already starts
        with one keeps just that one. Raises TooLongError, soon, where there are more than twice `limit` tokens.
        """
        _require_near(self._tokenizer, text, limit)
        ids = _encode(self._tokenizer, text, add_special_tokens=add_special_tokens)
        bos = self.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos] and text.startswith(self.bos_token or ""):
            return ids[1:]
        return ids

    def encode_plain(self, text: str, *, limit: int | None = None) -> list[int]:
        """Ids of `text` in which special tokens are plain text and none is added. Raises as `encode` does."""
        _require_near(self._plain, text, limit)
        return _encode(self._plain, text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        size = self.size
        known = [token_id for token_id in token_ids if 0 <= token_id < size]
        text: str = self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    @property
    def serialized(self) -> str:
        """The tokenizer as the text of a tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text

    @property
    def size(self) -> int:
        """Ids the tokenizer knows, added tokens included."""
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, exact also where it is a part of a character."""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
        if piece is None:
            return b""
        if self._byte_level:
            table = _byte_of_char()
            if all(char in table for char in piece):
                return bytes(table[char] for char in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        text: str = piece.replace("\u2581", " ")
        return text.encode()

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Ids of `text`.

    NOTE: `encode_batch_fast` lets other threads run meanwhile, which `encode` does not. For a short text that is no
    gain: getting back the interpreter from a busy thread takes longer than encoding it.
    """
    if len(text) < LONG_TEXT:
        short: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return short
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def _twin(tokenizer: Tokenizer) -> Tokenizer:
    """One that shares all but its settings. To read it anew would take half a second of a large vocabulary, in which no
    other thread of the process runs: every stream of the other models would stop."""
    twin = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(tokenizer, part)) is not None:
            setattr(twin, part, value)
    twin.add_tokens(
        [token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
    )  # ids go by their order
    return twin


def _require_near(tokenizer: Tokenizer, text: str, limit: int | None) -> None:
    """Raise TooLongError once the beginning of a long text has more than twice `limit` tokens, piece by piece.

    Cutting a text changes its number of tokens by a few, never by half.
    """
    if limit is None or len(text) <= max(PIECE, LONG_FOR_ITS_LIMIT * limit):
        return
    num_tokens = 0
    for start in range(0, len(text), PIECE):
        num_tokens += len(_encode(tokenizer, text[start : start + PIECE], add_special_tokens=False))
        if num_tokens > 2 * limit:
            seen = min(len(text), start + PIECE)
            raise TooLongError(f"{len(text)} characters, the first {seen} of which are {num_tokens} tokens or so")


def tokenizer_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json of a model directory, with special_tokens_map.json beneath; empty where there is none."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = directory / name
        if not path.exists():
            continue
        try:
            loaded = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {unreadable_because(error)}") from None
        if not isinstance(loaded, dict):
            raise CheckpointError(f"{path} holds a {type(loaded).__name__}; it must be a JSON object")
        merged |= {key: value for key, value in loaded.items() if value is not None}
    return merged


def special_token(config: dict[str, Any], name: str) -> str | None:
    """The text of `bos_token` and the like, which configs store as a string or as an object with `content`."""
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE (GPT-2) writes bytes as."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    for index, byte in enumerate(byte for byte in range(256) if byte not in set(printable)):
        table[chr(256 + index)] = byte
    return table
