"""AnyToken: a constraint that forbids nothing."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.scripted_tokens import VOCAB_SIZE


@dataclass
class AnyToken:
    """A grammar that allows everything, but has to see each token."""

    num_seen: int = 0

    @property
    def allowed(self) -> bytes:
        return bytes([255]) * (VOCAB_SIZE // 8)

    def advance(self, token_id: int) -> None:
        self.num_seen += 1

    def fork(self) -> AnyToken:
        return AnyToken()
