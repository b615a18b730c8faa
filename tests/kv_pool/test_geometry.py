"""Pages and frames: the numbers of docs' KV layout, the error text, and that no layer straddles a frame."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosspool.kv_pool.geometry import PageGeometry, choose_page_tokens, page_geometry
from crosspool.models.spec import DenseFFNSpec as Dense
from crosspool.models.spec import GQASpec, LayerSpec, MLASpec, ModelSpec, RopeSpec
from crosspool.units import MiB

ROPE = RopeSpec(theta=1e4, dim=64)
QWEN3 = GQASpec(num_heads=32, num_kv_heads=4, head_dim=128, rope=ROPE, softmax_scale=1.0)
LATENT = MLASpec(
    num_heads=20,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope=ROPE,
    softmax_scale=1.0,
)


def model(attention: GQASpec | MLASpec, num_layers: int, max_positions: int = 40960) -> ModelSpec:
    return ModelSpec(
        family="test",
        vocab_size=16,
        hidden_size=16,
        layers=(LayerSpec(attention=attention, ffn=Dense(intermediate_size=16)),) * num_layers,
        norm_eps=1e-6,
        tie_word_embeddings=True,
        max_position_embeddings=max_positions,
        dtype="bfloat16",
    )


@pytest.mark.parametrize(
    ("attention", "num_layers", "page_tokens", "layers_per_frame", "frames_per_page"),
    [(QWEN3, 48, 256, 4, 12), (LATENT, 47, 224, 8, 6), (LATENT, 27, 200, 9, 3)],
    ids=["qwen3-30b-a3b", "glm-4.7-flash", "deepseek-v2-lite"],
)
def test_pages_of_the_three_paper_models(attention, num_layers, page_tokens, layers_per_frame, frames_per_page):
    spec = model(attention, num_layers)
    assert choose_page_tokens(spec, 2 * MiB) == page_tokens
    geometry = page_geometry(spec, page_tokens=page_tokens, frame_bytes=2 * MiB)
    assert (geometry.layers_per_frame, geometry.frames_per_page) == (layers_per_frame, frames_per_page)
    assert geometry.fill >= 0.95


@given(num_layers=st.integers(1, 96), attention=st.sampled_from([QWEN3, LATENT]))
def test_a_size_that_is_no_power_of_two_fills_its_frames_at_full_speed(num_layers, attention):
    spec = model(attention, num_layers)
    tokens = choose_page_tokens(spec, 2 * MiB)
    geometry = page_geometry(spec, page_tokens=tokens, frame_bytes=2 * MiB)
    if tokens & (tokens - 1):
        assert geometry.fill >= 0.95
        assert 192 <= tokens <= 1024
        assert tokens % (64 if attention is QWEN3 else 8) == 0


def test_a_layer_that_does_not_fit_names_the_sizes_and_the_remedy():
    attention = GQASpec(num_heads=8, num_kv_heads=8, head_dim=192, rope=ROPE, softmax_scale=1.0)
    with pytest.raises(ValueError, match=r"512 tokens takes 3\.0 MiB, more than a 2\.0 MiB frame; .* <= 341 for big"):
        page_geometry(model(attention, 4), page_tokens=512, frame_bytes=2 * MiB, model="big")


def test_a_frame_below_one_token_asks_for_larger_frames():
    with pytest.raises(ValueError, match="use larger frames"):
        choose_page_tokens(model(QWEN3, 4), 1024)


def test_a_short_context_does_not_get_long_pages():
    assert choose_page_tokens(model(QWEN3, 4, max_positions=128), 2 * MiB) <= 256


@given(
    num_layers=st.integers(1, 64),
    elements=st.integers(1, 4096),
    page_tokens=st.integers(1, 512),
    frame_bytes=st.integers(1, 2 * MiB),
)
def test_no_layer_straddles_a_frame(num_layers, elements, page_tokens, frame_bytes):
    if page_tokens * elements * 2 > frame_bytes:
        with pytest.raises(ValueError, match="frame"):
            PageGeometry(
                num_layers=num_layers,
                elements_per_token_layer=elements,
                element_bytes=2,
                page_tokens=page_tokens,
                frame_bytes=frame_bytes,
            )
        return
    geometry = PageGeometry(
        num_layers=num_layers,
        elements_per_token_layer=elements,
        element_bytes=2,
        page_tokens=page_tokens,
        frame_bytes=frame_bytes,
    )
    parts = [(geometry.frame_of_layer(layer), geometry.offset_of_layer(layer)) for layer in range(num_layers)]
    assert len(set(parts)) == num_layers
    assert all(offset + geometry.layer_bytes <= frame_bytes for _, offset in parts)
    assert parts[-1][0] == geometry.frames_per_page - 1
    assert 0 < geometry.fill <= 1
