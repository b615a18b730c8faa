"""Attention of a chunk's queries over keys in frames or in rows, as one Triton kernel.

One program takes `BLOCK_M` neighbouring tokens of one sequence and one head, and walks over the keys that they see with
a running maximum and sum (online softmax, arXiv 1805.02867; tiled as in arXiv 2205.14135). Keys lie in the frames of
the shared cache (`PAGE_TOKENS` > 0), or expanded in rows. A walk may be taken up where other launches, or a library's
kernel on earlier keys, laid it down (`CARRIES`).
"""

# ruff: noqa: ANN001, ANN201, ANN202 - Triton functions are compiled, not called
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from crosspool.backends.cuda.device.jit_kernel import JitKernel


@triton.jit
def _dot(a, b, acc, WIDE: tl.constexpr):
    """acc + a b; WIDE: in fp32 throughout, for the interpreter, which has no bf16 products."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def _walk(
    acc,
    top,
    total,
    q1,
    q2,
    k,
    k_token_stride,
    v,
    v_token_stride,
    table,
    table_page_stride,
    frame_elements,
    positions,
    first,
    stop,
    key_first,
    last_key,
    scale_log2,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Take the keys at positions [first, stop) into (acc, top, total). MASKED: some are hidden from some rows."""
    offs_n = tl.arange(0, BLOCK_N)
    d1 = tl.arange(0, D1)
    dv = tl.arange(0, DV_PADDED)
    for start in tl.range(first, stop, BLOCK_N):
        keys = start + offs_n
        if PAGE_TOKENS == 0:
            k_rows = k + (keys - key_first).to(tl.int64) * k_token_stride
            v_rows = v + (keys - key_first).to(tl.int64) * v_token_stride
        elif PAGE_TOKENS % BLOCK_N == 0:
            frame = tl.load(table + start // PAGE_TOKENS * table_page_stride).to(tl.int64)
            rows = (start % PAGE_TOKENS + offs_n) * k_token_stride
            k_rows = k + frame * frame_elements + rows
            v_rows = v + frame * frame_elements + rows
        else:
            pages = tl.minimum(keys, last_key) // PAGE_TOKENS
            frames = tl.load(table + pages * table_page_stride).to(tl.int64)
            rows = frames * frame_elements + keys % PAGE_TOKENS * k_token_stride
            k_rows = k + rows
            v_rows = v + rows
        if MASKED:
            here = keys <= last_key
            k1 = tl.load(k_rows[:, None] + d1[None, :], mask=here[:, None], other=0.0)
        else:
            k1 = tl.load(k_rows[:, None] + d1[None, :])
        scores = _dot(q1, tl.trans(k1), tl.zeros((q1.shape[0], BLOCK_N), tl.float32), WIDE)
        if D2 > 0:
            d2 = D1 + tl.arange(0, D2)
            if MASKED:
                k2 = tl.load(k_rows[:, None] + d2[None, :], mask=here[:, None], other=0.0)
            else:
                k2 = tl.load(k_rows[:, None] + d2[None, :])
            scores = _dot(q2, tl.trans(k2), scores, WIDE)
        scores *= scale_log2
        if MASKED:
            seen = (keys[None, :] <= positions[:, None]) & here[None, :]
            if WINDOW > 0:
                seen = seen & (keys[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)  # rows that see no key yet
        else:
            higher = tl.maximum(top, tl.max(scores, 1))
            shift = higher
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if DV != DV_PADDED:
            v_mask = (dv < DV)[None, :] & (keys <= last_key)[:, None]
            values = tl.load(v_rows[:, None] + dv[None, :], mask=v_mask, other=0.0)
        elif MASKED:
            values = tl.load(v_rows[:, None] + dv[None, :], mask=here[:, None], other=0.0)
        else:
            values = tl.load(v_rows[:, None] + dv[None, :])
        acc = _dot(weights.to(values.dtype), values, acc, WIDE)
        top = higher
    return acc, top, total


@triton.jit(do_not_specialize=["table", "table_row_stride", "table_page_stride"])
def prefill_attention(
    q,
    q_token_stride,
    q_head_stride,
    k,
    k_token_stride,
    k_head_stride,
    v,
    v_token_stride,
    v_head_stride,
    table,
    table_row_stride,
    table_page_stride,
    frame_elements,
    blocks,
    sinks,
    out,
    held_acc,
    held_sums,
    heads,
    scale_log2,
    GROUP: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    CARRIES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """out (rows, heads, DV) = softmax(scale q k^T) v of each block's rows; grid (blocks, heads).

    q: (rows, heads, D1 + D2), strided. k, v: element 0 of key 0 (of frame 0) of head 0.
    held_acc (rows, heads, DV), held_sums (rows, heads, 2) fp32: where a walk is laid down between launches.
    blocks: (count, 8) int32: first row, rows, position of the first row, row of the frame table, first key's row, first
    key's position, position after the last key, unused.
    """
    block = blocks + tl.program_id(0) * 8
    head = tl.program_id(1)
    first_row = tl.load(block)
    num_rows = tl.load(block + 1)
    position = tl.load(block + 2)
    table_row = tl.load(block + 3).to(tl.int64)
    first_key_row = tl.load(block + 4).to(tl.int64)
    key_first = tl.load(block + 5)
    key_stop = tl.load(block + 6)
    kv_head = head // GROUP

    offs_m = tl.arange(0, BLOCK_M)
    inside = offs_m < num_rows
    positions = position + offs_m
    rows = (first_row + offs_m).to(tl.int64)
    d1 = tl.arange(0, D1)
    q_rows = q + rows * q_token_stride + head * q_head_stride
    q1 = tl.load(q_rows[:, None] + d1[None, :], mask=inside[:, None], other=0.0)
    q2 = q1
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        q2 = tl.load(q_rows[:, None] + d2[None, :], mask=inside[:, None], other=0.0)

    dv = tl.arange(0, DV_PADDED)
    out_at = (rows * heads + head)[:, None] * DV + dv[None, :]
    out_mask = inside[:, None] & (dv < DV)[None, :]
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, DV_PADDED), tl.float32)
    sums = held_sums + (rows * heads + head) * 2
    if CARRIES and key_first > 0:
        top = tl.load(sums, mask=inside, other=0.0)
        total = tl.load(sums + 1, mask=inside, other=1.0)
        acc = tl.load(held_acc + out_at, mask=out_mask, other=0.0)

    stop = tl.minimum(key_stop, position + num_rows)
    first = key_first
    if WINDOW > 0:
        first = tl.maximum(first, position - WINDOW + 1) // BLOCK_N * BLOCK_N
        unmasked_stop = first
    else:
        unmasked_stop = first + tl.maximum(tl.minimum(position + 1, stop) - first, 0) // BLOCK_N * BLOCK_N
    k += first_key_row * k_token_stride + kv_head * k_head_stride
    v += first_key_row * v_token_stride + kv_head * v_head_stride
    table += table_row * table_row_stride
    if WINDOW == 0:
        acc, top, total = _walk(
            acc, top, total, q1, q2, k, k_token_stride, v, v_token_stride,
            table, table_page_stride, frame_elements, positions, first, unmasked_stop, key_first, stop - 1, scale_log2,
            D1, D2, DV, DV_PADDED, BLOCK_N, PAGE_TOKENS, WINDOW, False, WIDE,
        )  # fmt: skip
    acc, top, total = _walk(
        acc, top, total, q1, q2, k, k_token_stride, v, v_token_stride,
        table, table_page_stride, frame_elements, positions, unmasked_stop, stop, key_first, stop - 1, scale_log2,
        D1, D2, DV, DV_PADDED, BLOCK_N, PAGE_TOKENS, WINDOW, True, WIDE,
    )  # fmt: skip

    if CARRIES and key_stop < position + num_rows:
        tl.store(sums, top, mask=inside)
        tl.store(sums + 1, total, mask=inside)
        tl.store(held_acc + out_at, acc, mask=out_mask)
    else:
        if HAS_SINKS:
            total += tl.exp2(tl.load(sinks + head).to(tl.float32) * 1.4426950408889634 - top)
        tl.store(out + out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=out_mask)


launch_prefill = JitKernel(prefill_attention)
