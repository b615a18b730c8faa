"""ServedModel: one model as the engine is asked to serve it."""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from crosspool.cluster.base import ModelPlacement
from crosspool.kv_pool.split import KVSplit, exchange_width
from crosspool.models.spec import DType, ModelSpec, MoEFFNSpec
from crosspool.pools_config import Route


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A model's spec and where it goes.

    kv_peers: the other KV ranks that hold KV of the model, and kv_split how (`kv_pool/split.py`); a page then takes
    `frames_per_page` frames of one rank, or under `heads` of each.
    has_random_weights: drawn at the model's shapes; no checkpoint is read.
    max_context: asked limit of prompt plus output tokens; None means the model's own. frames_per_page: from
    `kv_pool/geometry.py`. weights_ranks: in the order in which their partial sums are added. weights_shares:
    relative width of their slices; none: equal ones. prefill_ranks: those that hold it whole, to compute its prompts.
    kv_floor_bytes are kept for the model in its KV rank's pool, kv_ceiling_bytes are the most it may hold there; both
    as it is first served, they may change later. tokenizer: turns output ids into text; without one, outputs carry ids
    only.
    """

    name: str
    spec: ModelSpec
    directory: Path
    weights_ranks: tuple[str, ...]
    page_tokens: int
    frames_per_page: int
    frame_bytes: int
    weights_shares: tuple[float, ...] = ()
    prefill_ranks: tuple[str, ...] = ()
    kv_rank: str = "kv0"
    kv_peers: tuple[str, ...] = ()
    kv_split: KVSplit = "one"
    kv_dtype: DType = "float32"
    kv_floor_bytes: int = 0
    kv_ceiling_bytes: int | None = None
    max_context: int | None = None
    has_random_weights: bool = False
    route: Route = "ffn"
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        if not self.weights_ranks:
            raise ValueError(f"model {self.name} has no weights rank; name at least one")
        if self.max_context is not None and self.max_context < 2:
            raise ValueError(f"max_context of {self.name} is {self.max_context}; it must be at least 2")
        if self.page_tokens < 1 or self.frames_per_page < 1:
            raise ValueError(
                f"a page of {self.name} has {self.page_tokens} tokens and {self.frames_per_page} frames; "
                "both must be at least 1"
            )

    @property
    def kv_ranks(self) -> tuple[str, ...]:
        """Every KV rank of the model, its home first."""
        return (self.kv_rank, *self.kv_peers)

    @property
    def model_limit(self) -> int:
        """Prompt plus output tokens of one sequence as model and operator bound it; the KV pool may bound it lower."""
        own = self.spec.max_position_embeddings
        return own if self.max_context is None else min(own, self.max_context)

    @property
    def placement(self) -> ModelPlacement:
        return ModelPlacement(
            name=self.name,
            directory=self.directory,
            hidden_size=self.spec.hidden_size,
            kv_rank=self.kv_rank,
            weights_ranks=self.weights_ranks,
            weights_shares=self.weights_shares,
            page_tokens=self.page_tokens,
            frame_bytes=self.frame_bytes,
            kv_dtype=self.kv_dtype,
            kv_peers=self.kv_peers,
            kv_split=self.kv_split,
            exchange_width=exchange_width(self.spec, self.kv_split),
            has_random_weights=self.has_random_weights,
            route=self.route,
            choices_width=self.choices_width,
            prefill_ranks=self.prefill_ranks,
            kv_row_width=self.spec.kv_elements_per_token_layer,
            context_tokens=self.model_limit,
        )

    @property
    def choices_width(self) -> int:
        """Elements that a token's choice of experts takes where it crosses; 0 where it does not."""
        ffns = [layer.ffn for layer in self.spec.layers] if self.route == "kv" else []
        return max((ffn.choices_width for ffn in ffns if isinstance(ffn, MoEFFNSpec)), default=0)
