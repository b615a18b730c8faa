"""How one model's page lies in frames: pure arithmetic that the engine, the planner and every backend share."""

from dataclasses import dataclass

from crosspool.models.spec import DTYPE_BYTES, DType, MLASpec, ModelSpec
from crosspool.units import ceil_div, format_bytes

MIN_PAGE_TOKENS = 16
MAX_PAGE_TOKENS = 2048
PREFERRED_PAGE_TOKENS = 256
WANTED_FILL = 0.95
FULL_SPEED_TOKENS = (192, 1024)
"""Pages of so many tokens let decode attention run within 5 % of its best from 32K tokens on, GQA and MLA.
Source: benchmarks/results/page_tokens_h200_2026-11-30.md."""

PAGE_TOKENS_STEP = {"gqa": 64, "mla": 8}
"""Sizes looked at beside powers of two. Prefill reads GQA keys in frames, in blocks of 64 that should lie in one page;
latents (MLA) are gathered slot by slot in any case."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageGeometry:
    """A page is `page_tokens` tokens of all layers of one model, cut into whole frames.

    A layer's part is `page_tokens` rows of `elements_per_token_layer` elements and never straddles a frame: a frame
    holds the parts of `layers_per_frame` consecutive layers, the last frame of a page perhaps fewer.
    Raises ValueError where a layer's part is larger than a frame.
    """

    num_layers: int
    elements_per_token_layer: int
    element_bytes: int
    page_tokens: int
    frame_bytes: int
    model: str = "this model"  # for the error message alone

    def __post_init__(self) -> None:
        if self.page_tokens < 1:
            raise ValueError(f"page_tokens is {self.page_tokens} for {self.model}; it must be at least 1")
        if self.layer_bytes > self.frame_bytes:
            fitting = self.frame_bytes // self.token_layer_bytes
            layer, frame = format_bytes(self.layer_bytes), format_bytes(self.frame_bytes)
            remedy = f"set page_tokens <= {fitting}" if fitting else "use larger frames"
            raise ValueError(
                f"a layer of {self.page_tokens} tokens takes {layer}, more than a {frame} frame; "
                f"{remedy} for {self.model}"
            )

    @property
    def token_layer_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.elements_per_token_layer * self.element_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's part of a page."""
        return self.page_tokens * self.token_layer_bytes

    @property
    def layers_per_frame(self) -> int:
        return self.frame_bytes // self.layer_bytes

    @property
    def frames_per_page(self) -> int:
        return ceil_div(self.num_layers, self.layers_per_frame)

    @property
    def page_bytes(self) -> int:
        """Physical bytes a page takes from the budget."""
        return self.frames_per_page * self.frame_bytes

    @property
    def fill(self) -> float:
        """Fraction of a page's physical bytes that tokens can use."""
        return self.num_layers * self.layer_bytes / self.page_bytes

    def num_pages(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one sequence."""
        return ceil_div(num_tokens, self.page_tokens)

    def frame_of_layer(self, layer: int) -> int:
        """Index into a page's list of frames."""
        return layer // self.layers_per_frame

    def offset_of_layer(self, layer: int) -> int:
        """Byte at which the layer's part starts in its frame."""
        return layer % self.layers_per_frame * self.layer_bytes


def page_geometry(
    spec: ModelSpec, *, page_tokens: int, frame_bytes: int, kv_dtype: DType | None = None, model: str | None = None
) -> PageGeometry:
    """Geometry of `spec`'s pages; the cache has the weights' dtype unless `kv_dtype` says otherwise."""
    return PageGeometry(
        num_layers=spec.num_layers,
        elements_per_token_layer=spec.kv_elements_per_token_layer,
        element_bytes=DTYPE_BYTES[kv_dtype or spec.dtype],
        page_tokens=page_tokens,
        frame_bytes=frame_bytes,
        model=model or f"this {spec.family} model",
    )


def choose_page_tokens(spec: ModelSpec, frame_bytes: int, kv_dtype: DType | None = None) -> int:
    """The power of two that costs a typical request the fewest frames; among equals the one nearest to 256.

    Typical: 2,048 tokens, or the model's whole context if that is shorter. Where such pages leave more than 5 % of
    their frames empty, another size of full speed that fills them is taken, if there is one: 224 tokens for the 47
    layers of GLM-4.7-Flash, 200 for the 27 of DeepSeek-V2-Lite. Raises ValueError where not even 16 tokens of a layer
    fit a frame.
    """
    reference_tokens = min(MAX_PAGE_TOKENS, spec.max_position_embeddings)

    def geometry(page_tokens: int) -> PageGeometry:
        return page_geometry(spec, page_tokens=page_tokens, frame_bytes=frame_bytes, kv_dtype=kv_dtype)

    def cost(page_tokens: int) -> tuple[int, int]:
        found = geometry(page_tokens)
        frames = found.num_pages(reference_tokens) * found.frames_per_page
        return frames, abs(page_tokens.bit_length() - PREFERRED_PAGE_TOKENS.bit_length())

    fitting = frame_bytes // geometry(MIN_PAGE_TOKENS).token_layer_bytes
    best = min((MIN_PAGE_TOKENS << shift for shift in range(8) if MIN_PAGE_TOKENS << shift <= fitting), key=cost)
    smallest, largest = FULL_SPEED_TOKENS
    if geometry(best).fill >= WANTED_FILL or reference_tokens < largest:
        return best
    step = PAGE_TOKENS_STEP["mla" if any(isinstance(layer.attention, MLASpec) for layer in spec.layers) else "gqa"]
    filled = [
        found for found in map(geometry, range(smallest, min(largest, fitting) + 1, step)) if found.fill >= WANTED_FILL
    ]
    if not filled:
        return best
    # The last page of a request is half empty on average.
    return min(
        filled, key=lambda found: (reference_tokens / found.page_tokens + 0.5) * found.frames_per_page
    ).page_tokens
