"""How a chunk of a prompt crosses: in pieces, each a layer's work of one side, so that both sides work at once.

While the weights ranks run the FFN of one piece, the KV rank runs the attention of the next. Both halves compute the
same cut from the step's number of tokens alone. A step's 1,024 epochs are shared by all (layer, piece) in the order of
their crossings; a piece's rows have a place of their own in the slot of a layer's parity.
"""

from dataclasses import dataclass

from crosspool.backends.cuda.steps.passes import PASS_TOKENS
from crosspool.scheduler.step import LAYERS_PER_STEP, StepHeader, epoch
from crosspool.units import ceil_div

PIECE_TOKENS = 2048
"""Enough that an FFN's products take longer than reading its experts (Qwen3: 1.2 GB a layer, 0.28 ms)."""


PADDED_ROWS = (64, 128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048)
"""Rows of a piece's products: with few sizes, a load goes through all of a library's kernels that prompts will need."""


def padded_rows(tokens: int) -> int:
    """The rows that products of so many are run with; what is computed behind them means nothing."""
    return next((rows for rows in PADDED_ROWS if rows >= tokens), tokens)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, stop) of a step."""

    index: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The pieces of a step. Flags carry `base` + `crossing(layer, piece)` + 1."""

    pieces: tuple[Piece, ...]
    num_layers: int
    base: int

    def crossing(self, layer: int, piece: Piece) -> int:
        """The number of a crossing within the step, the same in both directions."""
        return layer * len(self.pieces) + piece.index

    @property
    def num_crossings(self) -> int:
        return self.num_layers * len(self.pieces)

    @property
    def last_epoch(self) -> int:
        return self.base + self.num_crossings


def is_chunk(header: StepHeader) -> bool:
    """Whether a step runs in pieces; short prompts and decode run as passes."""
    return header.phase == "prefill" and header.num_tokens > PASS_TOKENS


def chunk_plan(num_tokens: int, step_seq: int, num_layers: int, piece_tokens: int | None = None) -> ChunkPlan:
    """Pieces of nearly equal size. Raises ValueError where their crossings need more epochs than a step has."""
    piece_tokens = piece_tokens or PIECE_TOKENS
    count = ceil_div(num_tokens, piece_tokens)
    most = (LAYERS_PER_STEP - 1) // num_layers
    if count > most:
        raise ValueError(
            f"a chunk of {num_tokens} tokens; with {num_layers} layers the CUDA backend runs at most "
            f"{most * piece_tokens} a step: lower max_num_batched_tokens"
        )
    bounds = [num_tokens * idx // count for idx in range(count + 1)]
    pieces = tuple(Piece(idx, bounds[idx], bounds[idx + 1]) for idx in range(count))
    return ChunkPlan(pieces, num_layers, epoch(step_seq, 0) - 1)
