"""Single CUDA kernels, run on the CPU, against float64 arithmetic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.attention import AttentionScratch, attention_decode  # noqa: E402
from crosspool.backends.cuda.attention_variants import choose_variant, key_value_dims, num_splits  # noqa: E402
from crosspool.backends.cuda.ffn_weights import pack_ffn  # noqa: E402
from crosspool.backends.cuda.gemv import gemv, variant  # noqa: E402
from crosspool.backends.cuda.moe import ffn  # noqa: E402
from crosspool.backends.cuda.moe_params import FFNScratch  # noqa: E402
from crosspool.backends.cuda.rope import RopeTable, gqa_input, mla_input  # noqa: E402
from crosspool.backends.cuda.router import Routing, route, route_lists  # noqa: E402
from crosspool.backends.numpy.rotary import RotaryTable  # noqa: E402
from crosspool.backends.numpy.router import route as numpy_route  # noqa: E402
from crosspool.kv_pool.geometry import PageGeometry  # noqa: E402
from crosspool.models.spec import GQASpec, MLASpec, MoEFFNSpec, RopeSpec, RouterSpec, SharedExpertSpec  # noqa: E402
from tests.backends.cuda.decoding import relative_error, shuffled_cache  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402

pytestmark = pytest.mark.judge

CPU = torch.device("cpu")
ROUNDED = 4e-3
"""One rounding of the result to bf16, and of probabilities or activations before a product."""
EXACT = 1e-5
"""fp32 sums of bf16 products."""


def draw(*shape, seed=0, std=1.0):
    return (std * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def nan(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), dtype=dtype)


@pytest.mark.parametrize(
    ("rows", "k", "tokens", "shape"),
    [
        (40, 256, 3, None),
        (33, 72, 1, None),
        (20, 520, 12, (4, 2, 0)),
        (16, 2048, 2, None),
        (48, 1280, 32, (8, 4, 0)),
        (40, 1992, 9, (4, 4, 12)),
        (20, 4096, 3, (16, 2, 6)),
    ],
)
def test_gemv_equals_the_product(rows, k, tokens, shape):
    weight, x, y = draw(rows, k), draw(tokens, k, seed=1), nan(tokens, rows)
    gemv(EmulatedKernels(), weight, x, y, shape=shape)
    assert relative_error(y, x.double() @ weight.double().T) < EXACT


def test_gemv_norms_its_input_and_adds_bias_and_residual():
    weight, x, norm, bias = draw(24, 64), draw(5, 64, seed=1), draw(64, seed=2), draw(24, seed=3)
    residual = draw(5, 24, seed=4).float()
    normed = x.double() / torch.sqrt((x.double() ** 2).mean(-1, keepdim=True) + 1e-6) * norm.double()
    expected = normed @ weight.double().T + bias.double() + residual.double()
    gemv(EmulatedKernels(), weight, x, residual, norm_weight=norm, norm_eps=1e-6, bias=bias, residual=residual)
    assert relative_error(residual, expected) < ROUNDED


@pytest.mark.parametrize("k", [64, 192, 768, 1536, 2048, 3072, 4096, 5120])
@pytest.mark.parametrize("rows", [16, 5120, 150000])
def test_chosen_gemvs_hold_a_row_or_take_it_in_passes(rows, k):
    """With chunks in shared memory there is one pass; with a norm there are none."""
    for norms in (False, True):
        warps, chunks, held = variant(rows, k, norms=norms)
        assert not held or (warps * (chunks + held) * 32 >= k and not norms)


def test_grouped_gemv_leaves_what_lies_between_its_outputs_alone():
    weight, x, y = draw(4, 32, 16), draw(3, 4, 32, seed=1)[:, :, :16], nan(3, 4, 48, dtype=torch.bfloat16)
    gemv(EmulatedKernels(), weight, x, y[:, :, :32])
    assert relative_error(y[:, :, :32], torch.einsum("grk,tgk->tgr", weight.double(), x.double())) < ROUNDED
    assert y[:, :, 32:].isnan().all()


def test_gemv_refuses_what_it_cannot_load():
    with pytest.raises(ValueError, match="multiples of 8"):
        gemv(EmulatedKernels(), draw(16, 60), draw(1, 60), nan(1, 16))
    with pytest.raises(ValueError, match="33 tokens"):
        gemv(EmulatedKernels(), draw(16, 64), draw(33, 64), nan(33, 16))


ROPE = RopeSpec(theta=10000.0, dim=64)
INTERLEAVED = RopeSpec(theta=10000.0, dim=64, interleaved=True)


def gqa(heads, kv_heads, dim, **options):
    return GQASpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, rope=ROPE, softmax_scale=dim**-0.5, **options)


def mla(heads, rope=ROPE):
    return MLASpec(
        num_heads=heads,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope=rope,
        softmax_scale=192**-0.5,
    )


ATTENTIONS = {
    "gqa_d64": gqa(4, 2, 64, qk_norm="full"),
    "gqa_d128_group_of_8": gqa(16, 2, 128, qk_norm="head"),
    "gqa_d128_group_of_12": gqa(24, 2, 128),
    "gqa_d128_group_of_20": gqa(20, 1, 128),
    "gqa_d256": gqa(8, 2, 256, qk_norm="head"),
    "gqa_d128_interleaved": GQASpec(
        num_heads=8, num_kv_heads=1, head_dim=128, rope=INTERLEAVED, softmax_scale=0.09, qk_norm="head"
    ),
    "gqa_window_sinks": gqa(8, 1, 64, sliding_window=100, sinks=True),
    "mla_16_heads": mla(16),
    "mla_20_heads": mla(20, INTERLEAVED),
}


@pytest.mark.parametrize("how", ["one_row_per_sequence", "any_shape", "neither"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_equals_softmax_over_the_cache(name, how):
    check_attention(ATTENTIONS[name], how, EmulatedKernels(), page_tokens=48)


@pytest.mark.parametrize("name", ["mla_16_heads", "mla_20_heads"])
def test_warpgroups_attend_over_latents_where_pages_hold_whole_tiles(name):
    kernels = EmulatedKernels()
    check_attention(ATTENTIONS[name], "one_row_per_sequence", kernels, page_tokens=64)
    assert [kernel for kernel, _, _ in kernels.launches if kernel.endswith("_wide")]


@pytest.mark.parametrize(("is_hopper", "page_tokens"), [(False, 64), (True, 48)])
def test_other_pages_and_gpus_without_warpgroups_take_the_other_kernels(is_hopper, page_tokens):
    kernels = EmulatedKernels(is_hopper=is_hopper)
    check_attention(ATTENTIONS["mla_16_heads"], "one_row_per_sequence", kernels, page_tokens=page_tokens)
    assert not [kernel for kernel, _, _ in kernels.launches if kernel.endswith("_wide")]


def test_what_lanes_cannot_turn_is_made_ready_before():
    kernels = EmulatedKernels()
    check_attention(ATTENTIONS["gqa_d64"], "one_row_per_sequence", kernels, page_tokens=48)
    ran = [kernel for kernel, _, _ in kernels.launches]
    assert "gqa_rope_cache" in ran
    assert "attention_gqa_d64_h8_ready" in ran


def check_attention(spec, how, kernels, *, page_tokens):
    geometry = PageGeometry(
        num_layers=3,
        elements_per_token_layer=spec.kv_elements_per_token,
        element_bytes=2,
        page_tokens=page_tokens,
        frame_bytes=2 * page_tokens * spec.kv_elements_per_token * 2,
    )
    lengths = [1, 450, 257]
    cache = shuffled_cache(geometry, 3, 450, CPU)
    rows = draw(3, 450, spec.kv_elements_per_token, seed=5)
    fill(cache, 2, rows, [length - 1 for length in lengths])
    splits = 3
    positions = torch.tensor(lengths, dtype=torch.int32) - 1
    rope = RopeTable.allocate(spec.rope, 3, CPU)
    rope.update(kernels, positions)
    inputs, queries, newest, _keep = project(spec, rope, positions)
    for row, length in enumerate(lengths):
        rows[row, length - 1] = newest[row].bfloat16()
    _, value_dim = key_value_dims(spec)
    out = nan(3, spec.num_heads, value_dim, dtype=torch.bfloat16)
    sinks = draw(spec.num_heads, seed=7) if getattr(spec, "sinks", False) else None
    assert choose_variant(spec) is not None
    most = 3 * splits * spec.num_heads
    scratch = AttentionScratch(nan(most * value_dim), nan(most * 2), nan(most * 600, dtype=torch.bfloat16))
    attention_decode(
        kernels,
        spec,
        inputs,
        cache,
        2,
        positions,
        torch.tensor(lengths, dtype=torch.int32),
        out,
        scratch,
        splits=splits,
        sinks=sinks,
        one_row_per_sequence=how == "one_row_per_sequence",
        any_shape=how == "any_shape",
    )
    expected = torch.stack([reference(spec, queries[i], rows[i, :length], sinks) for i, length in enumerate(lengths)])
    assert relative_error(out, expected) < 2 * ROUNDED
    for row, length in enumerate(lengths):
        assert relative_error(slot(cache, 2, row, length - 1), newest[row]) < ROUNDED


@pytest.mark.parametrize(("length", "used"), [(64, 1), (128, 2), (256, 2), (513, 3), (577, 4)])
def test_short_contexts_go_into_few_splits(length, used):
    """Two multiprocessors and four splits: a block a multiprocessor up to two tiles of 64 slots a split, then all."""
    spec = gqa(8, 1, 128)
    geometry = PageGeometry(
        num_layers=1,
        elements_per_token_layer=spec.kv_elements_per_token,
        element_bytes=2,
        page_tokens=64,
        frame_bytes=64 * spec.kv_elements_per_token * 2,
    )
    cache = shuffled_cache(geometry, 1, length, CPU)
    fill(cache, 0, draw(1, length, spec.kv_elements_per_token), [length])
    kernels, positions = EmulatedKernels(num_sms=2), torch.tensor([length - 1], dtype=torch.int32)
    rope = RopeTable.allocate(spec.rope, 1, CPU)
    rope.update(kernels, positions)
    inputs, _queries, _newest, _keep = project(spec, rope, positions)
    most = 4 * spec.num_heads
    scratch = AttentionScratch(nan(most * 128), torch.zeros(most * 2), nan(most * 128, dtype=torch.bfloat16))
    out = nan(1, 8, 128, dtype=torch.bfloat16)
    attention_decode(
        kernels, spec, inputs, cache, 0, positions, positions + 1, out, scratch, splits=4, one_row_per_sequence=True
    )
    assert (scratch.partial_ml.view(4, spec.num_heads, 2)[:, 0, 1] > 0).sum() == used
    assert not out.isnan().any()


@pytest.mark.parametrize("how", ["one_row_per_sequence", "any_shape", "neither"])
@pytest.mark.parametrize("name", ["gqa_d128_group_of_8", "gqa_window_sinks", "mla_20_heads"])
def test_a_tokens_attention_has_the_same_bits_in_every_batch(name, how):
    """A lone token's splits are blocks of their own; in a batch one block takes several, of other tokens others."""
    spec, lengths = ATTENTIONS[name], [700, 70, 450, 1]
    geometry = PageGeometry(
        num_layers=1,
        elements_per_token_layer=spec.kv_elements_per_token,
        element_bytes=2,
        page_tokens=64,
        frame_bytes=64 * spec.kv_elements_per_token * 2,
    )
    cache = shuffled_cache(geometry, 4, 700, CPU)
    fill(cache, 0, draw(4, 700, spec.kv_elements_per_token, seed=5), [length - 1 for length in lengths])
    kernels = EmulatedKernels(num_sms=7)
    splits = num_splits(spec, kernels.num_sms)
    _, value_dim = key_value_dims(spec)
    sinks = draw(spec.num_heads, seed=7) if getattr(spec, "sinks", False) else None
    all_positions = torch.tensor(lengths, dtype=torch.int32) - 1

    def attended(rows):
        positions = all_positions[rows]
        rope = RopeTable.allocate(spec.rope, len(rows), CPU)
        rope.update(kernels, positions)
        most = len(rows) * splits * spec.num_heads
        scratch = AttentionScratch(nan(most * value_dim), nan(most * 2), nan(most * 600, dtype=torch.bfloat16))
        out = nan(len(rows), spec.num_heads, value_dim, dtype=torch.bfloat16)
        inputs, _queries, _newest, _keep = project(spec, rope, positions, rows)
        attention_decode(
            kernels,
            spec,
            inputs,
            replace(cache, frame_table=cache.frame_table[rows].contiguous()),
            0,
            positions,
            positions + 1,
            out,
            scratch,
            splits=splits,
            sinks=sinks,
            one_row_per_sequence=how == "one_row_per_sequence",
            any_shape=how == "any_shape",
        )
        return out

    together = attended([0, 1, 2, 3])
    grids = [
        grid[0] for kernel, grid, _ in kernels.launches if kernel.startswith("attention") and "combine" not in kernel
    ]
    for row in range(4):
        assert torch.equal(attended([row])[0], together[row])
    assert torch.equal(attended([0, 2])[1], together[2])
    assert grids[0] < splits or how == "any_shape", "the batch takes as many blocks a token as a lone token"


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("name", ["gqa_d128_group_of_8", "mla_16_heads"])
def test_tokens_of_one_sequence_see_each_other(name, backwards):
    spec, tokens, first = ATTENTIONS[name], 4, 61
    geometry = PageGeometry(
        num_layers=1,
        elements_per_token_layer=spec.kv_elements_per_token,
        element_bytes=2,
        page_tokens=16,
        frame_bytes=16 * spec.kv_elements_per_token * 2,
    )
    one = shuffled_cache(geometry, 1, first + tokens, CPU)
    cache = replace(one, frame_table=one.frame_table.expand(tokens, -1, -1).contiguous())
    rows = draw(1, first + tokens, spec.kv_elements_per_token, seed=5)
    fill(cache, 0, rows, [first])
    kernels = EmulatedKernels(backwards=backwards)
    positions = torch.arange(first, first + tokens, dtype=torch.int32)
    rope = RopeTable.allocate(spec.rope, tokens, CPU)
    rope.update(kernels, positions)
    inputs, queries, newest, _keep = project(spec, rope, positions)
    rows[0, first:] = newest.bfloat16()
    _, value_dim = key_value_dims(spec)
    out = nan(tokens, spec.num_heads, value_dim, dtype=torch.bfloat16)
    most = tokens * 2 * spec.num_heads
    scratch = AttentionScratch(nan(most * value_dim), nan(most * 2), nan(most * 300, dtype=torch.bfloat16))
    attention_decode(kernels, spec, inputs, cache, 0, positions, positions + 1, out, scratch, splits=2)
    expected = torch.stack([reference(spec, queries[i], rows[0, : first + i + 1], None) for i in range(tokens)])
    assert relative_error(out, expected) < 2 * ROUNDED


def project(spec, rope, positions, rows=None):
    """Random projections; what they become in float64: queries (tokens, heads, D) and cache rows (tokens, row).

    rows: of four tokens, those that take part, in place of the first ones.
    """
    tokens = len(positions)
    num_drawn, rows = (tokens, slice(None)) if rows is None else (4, rows)
    if isinstance(spec, MLASpec):
        q_latent = draw(num_drawn, spec.num_heads, 512, seed=6)[rows].contiguous()
        q = draw(num_drawn, spec.num_heads * 192, seed=8)[rows].contiguous()
        kv_a = draw(num_drawn, 576, seed=9)[rows].contiguous()
        norm = draw(512, seed=10)
        inputs = mla_input(spec, rope, q_latent, q, kv_a, kv_a_norm=norm)
        turned = rotated(spec.rope, q.view(tokens, -1, 192)[..., 128:], positions)
        latent = rms(kv_a[:, :512].double(), spec.lora_norm_eps) * norm.double()
        key = rotated(spec.rope, kv_a[:, None, 512:], positions)[:, 0]
        queries = torch.cat([q_latent.double(), turned], dim=-1)
        return inputs, queries, torch.cat([latent, key], dim=-1), (q_latent, q, kv_a, norm)
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    qkv = draw(num_drawn, (heads + 2 * kv_heads) * dim, seed=6)[rows].contiguous()
    q, k, v = qkv.double().split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    norms = [None, None]
    if spec.qk_norm != "none":
        widths = (heads * dim, kv_heads * dim) if spec.qk_norm == "full" else (dim, dim)
        norms = [draw(width, seed=8 + width) for width in widths]
        q, k = (
            (rms(x.view(tokens, -1, width), 1e-6) * norm.double()).reshape(tokens, -1)
            for x, width, norm in zip((q, k), widths, norms, strict=True)
        )
    inputs = gqa_input(spec, rope, qkv, q_norm=norms[0], k_norm=norms[1], eps=1e-6)
    q, k = (rotated(spec.rope, x.view(tokens, -1, dim), positions) for x in (q, k))
    return inputs, q, torch.cat([k.flatten(1), v], dim=-1), (qkv, *norms)


def rms(x, eps):
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps)


def rotated(rope, x, positions):
    """x (tokens, heads, D): its first rope.dim elements turned, in float64."""
    turns = torch.from_numpy(RotaryTable(rope).turns(positions.numpy().astype(np.int64))).to(torch.complex128)
    x, half = x.double().clone(), rope.dim // 2
    first, second = (
        (x[..., : rope.dim : 2], x[..., 1 : rope.dim : 2])
        if rope.interleaved
        else (
            x[..., :half],
            x[..., half : rope.dim],
        )
    )
    product = torch.complex(first, second) * turns
    first.copy_(product.real)
    second.copy_(product.imag)
    return x


def slot(cache, layer, row, token):
    geometry = cache.geometry
    page, at = divmod(token, geometry.page_tokens)
    frame = cache.frame_table[row, page, geometry.frame_of_layer(layer)]
    start = geometry.offset_of_layer(layer) // 2 + at * geometry.elements_per_token_layer
    return cache.frames.view(torch.bfloat16)[frame, start : start + geometry.elements_per_token_layer]


def fill(cache, layer, rows, lengths):
    geometry = cache.geometry
    frames = cache.frames.view(torch.bfloat16)
    for row, length in enumerate(lengths):
        for token in range(length):
            page, slot = divmod(token, geometry.page_tokens)
            frame = cache.frame_table[row, page, geometry.frame_of_layer(layer)]
            start = geometry.offset_of_layer(layer) // 2 + slot * geometry.elements_per_token_layer
            frames[frame, start : start + rows.shape[-1]] = rows[row, token]


def reference(spec, q, rows, sinks):
    q, rows = q.double(), rows.double()
    if isinstance(spec, MLASpec):
        keys = rows[:, None].expand(-1, spec.num_heads, -1)
        values = keys[..., : spec.kv_lora_rank]
    else:
        split = rows.view(len(rows), 2, spec.num_kv_heads, spec.head_dim)
        keys, values = split.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=2).unbind(1)
        if spec.sliding_window:
            keys, values = keys[-spec.sliding_window :], values[-spec.sliding_window :]
    scores = torch.einsum("hd,nhd->hn", q, keys) * spec.softmax_scale
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
    weights = scores.softmax(-1)[:, : len(keys)]
    return torch.einsum("hn,nhd->hd", weights, values)


ROUTERS = {
    "softmax": RouterSpec(score="softmax", renormalise=True),
    "softmax_unnormalised": RouterSpec(score="softmax", scale=1.5),
    "sigmoid_bias": RouterSpec(score="sigmoid", choice_bias=True, renormalise=True, renormalise_eps=1e-20, scale=1.8),
    "groups_top2": RouterSpec(score="sigmoid", choice_bias=True, num_groups=8, topk_groups=3, renormalise=True),
    "groups_max": RouterSpec(score="softmax", num_groups=4, topk_groups=2, group_score="max"),
    "of_topk": RouterSpec(score="softmax_of_topk", logit_bias=True),
}


def moe_layer(router, *, experts=64, top_k=6, hidden=64, width=24, shared=None, seed=0, **options):
    spec = MoEFFNSpec(
        num_experts=experts,
        top_k=top_k,
        expert_intermediate_size=width,
        router=router,
        shared=None if shared is None else SharedExpertSpec(intermediate_size=shared, gated=True),
        **options,
    )
    tensors = {
        "router": draw(experts, hidden, seed=seed, std=0.3).float(),
        "expert_gate_up": draw(experts, 2 * width, hidden, seed=seed + 1, std=hidden**-0.5),
        "expert_down": draw(experts, hidden, width, seed=seed + 2, std=width**-0.5),
    }
    if router.choice_bias:
        tensors["choice_bias"] = draw(experts, seed=seed + 3, std=0.3).float()
    if router.logit_bias:
        tensors["router_bias"] = draw(experts, seed=seed + 3).float()
    if options.get("expert_bias"):
        tensors["expert_gate_up_bias"] = draw(experts, 2 * width, seed=seed + 4)
        tensors["expert_down_bias"] = draw(experts, hidden, seed=seed + 5)
    if shared is not None:
        tensors["shared_gate"] = draw(shared, hidden, seed=seed + 6, std=hidden**-0.5)
        tensors["shared_up"] = draw(shared, hidden, seed=seed + 7, std=hidden**-0.5)
        tensors["shared_down"] = draw(hidden, shared, seed=seed + 8, std=shared**-0.5)
        tensors["shared_expert_gate"] = draw(1, hidden, seed=seed + 9, std=0.2)
    return pack_ffn(spec, hidden, tensors)


@pytest.mark.parametrize("tokens", [1, 5, 32])
@pytest.mark.parametrize("name", ROUTERS)
def test_router_chooses_and_weighs_as_numpy_does(name, tokens):
    layer = moe_layer(ROUTERS[name])
    spec, x = layer.spec, draw(tokens, 64, seed=20)
    routing = Routing.allocate(tokens, spec.num_experts, spec.top_k, CPU)
    route(EmulatedKernels(), layer, x, routing)
    logits = (x.float() @ layer.router.weight.T).numpy()
    if layer.router.logit_bias is not None:
        logits = logits + layer.router.logit_bias.numpy()
    bias = None if layer.router.choice_bias is None else layer.router.choice_bias.numpy()
    ids, weights = numpy_route(logits, spec.router, spec.top_k, bias)
    np.testing.assert_array_equal(routing.topk_ids.view(tokens, -1).numpy(), ids)
    np.testing.assert_allclose(routing.topk_weights.view(tokens, -1).numpy(), weights, rtol=1e-5)
    assert_lists(routing, ids)
    assert routing.ticket.item() == 0


def assert_lists(routing, ids):
    unique = np.unique(ids)
    assert routing.num_unique.item() == len(unique)
    np.testing.assert_array_equal(routing.unique_ids[: len(unique)].numpy(), unique)
    np.testing.assert_array_equal(routing.expert_pairs[: ids.size].numpy(), ids.ravel().argsort(kind="stable"))
    starts = np.searchsorted(np.sort(ids.ravel()), unique)
    np.testing.assert_array_equal(routing.unique_offsets[: len(unique) + 1].numpy(), [*starts, ids.size])


def test_lists_can_be_made_from_ids_that_came_from_elsewhere():
    spec = moe_layer(ROUTERS["softmax"]).spec
    routing = Routing.allocate(3, 64, 6, CPU)
    ids = np.array([[3, 9, 63, 0, 5, 6], [9, 3, 1, 2, 40, 41], [63, 9, 7, 8, 10, 11]])
    routing.topk_ids.copy_(torch.from_numpy(ids.ravel()))
    route_lists(EmulatedKernels(), spec, 3, 64, routing)
    assert_lists(routing, ids)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 9, 32])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shared": 160},
        {"expert_bias": True, "activation": "gpt_oss_swiglu"},
        {"experts": 4, "top_k": 3, "width": 264, "shared": 8},
        {"experts": 4, "top_k": 2, "width": 784, "hidden": 1056, "shared": 784},
    ],
)
def test_ffn_equals_the_sum_over_chosen_experts(tokens, options, is_fused):
    layer = moe_layer(ROUTERS["softmax_unnormalised"], **options)
    x, out = draw(tokens, layer.hidden, seed=30), nan(tokens, layer.hidden)
    scratch = FFNScratch.for_layers([layer], tokens, CPU)
    scratch.act.fill_(float("nan"))
    kernels = EmulatedKernels(num_sms=3, is_hopper=is_fused)
    ffn(kernels, layer, x, out, scratch, fused=True)
    assert any(kernel == "moe_fused" for kernel, _, _ in kernels.launches) == is_fused
    ids = scratch.routing.topk_ids.view(tokens, -1)
    weights = scratch.routing.topk_weights.view(tokens, -1)
    expected = torch.stack([ffn_reference(layer, x[t], ids[t], weights[t]) for t in range(tokens)])
    assert relative_error(out, expected) < ROUNDED


@pytest.mark.parametrize(
    "options",
    [
        {"width": 264, "shared": 160},
        {"experts": 12, "top_k": 4, "width": 96},
        {"width": 784, "top_k": 3, "shared": 784},
    ],
)
def test_a_tokens_ffn_has_the_same_bits_in_every_batch(options):
    """By kernels that follow each other and by one that holds the device: prompts make a lane change between them."""
    layer = moe_layer(ROUTERS["softmax"], **options)
    x = draw(19, layer.hidden, seed=30)

    def outputs(rows, kernels):
        out = nan(len(rows), layer.hidden)
        ffn(kernels, layer, x[rows].contiguous(), out, FFNScratch.for_layers([layer], len(rows), CPU), fused=True)
        return out

    apart, fused = (EmulatedKernels(num_sms=3, is_hopper=is_fused) for is_fused in (False, True))
    together = outputs(list(range(19)), apart)
    for kernels in (apart, fused):
        for rows in ([0], [7], [18], [7, 3], [9, 10, 11, 12, 7, 14, 15, 16, 17]):
            assert torch.equal(outputs(rows, kernels), together[rows])
    assert torch.equal(outputs(list(range(19)), fused), together)


def ffn_reference(layer, x, ids, weights):
    x = x.double()
    total = torch.zeros(len(x), dtype=torch.float64)
    for expert, weight in zip(ids.tolist(), weights.double(), strict=True):
        gate_up = layer.gate_up[expert].double() @ x
        if layer.gate_up_bias is not None:
            gate_up = gate_up + layer.gate_up_bias[expert].double()
        output = layer.down[expert].double() @ activation(layer.spec.activation, gate_up)
        if layer.down_bias is not None:
            output = output + layer.down_bias[expert].double()
        total += weight * output
    if layer.shared_gate is not None:
        gate_up = torch.cat([layer.shared_gate, layer.shared_up]).double() @ x
        gate = torch.sigmoid(layer.router.weight[-1].double() @ x)
        total += gate * (layer.shared_down.double() @ activation("silu", gate_up))
    return total


def activation(kind, gate_up):
    gate, up = gate_up.chunk(2)
    if kind == "silu":
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)
