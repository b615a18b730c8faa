"""Whether what a token computes depends on the rows beside it: decode's kernels, a library's products, chunks.

Bits are compared, on random weights of a model's true shapes. Nothing here is timed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.report import Report
from benchmarks.split_model.undivided import UndividedDecoder
from crosspool.backends.cuda.chunks.chunk_ffn import ChunkFFN
from crosspool.backends.cuda.chunks.chunk_half import ChunkHalf
from crosspool.backends.cuda.chunks.chunk_plan import PADDED_ROWS, chunk_plan
from crosspool.backends.cuda.chunks.chunk_rows import ChunkRows
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.products import grouped_linear, linear
from crosspool.backends.cuda.kv_frames.cache import PagedCache
from crosspool.backends.cuda.kv_rank.attention_half import AttentionHalf
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.loading.weights import AttentionWeights
from crosspool.backends.cuda.weights_rank.ffn_half import FFNHalf
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.models.spec import ModelSpec

PAGE_TOKENS = 64
Prompt = tuple[int, Sequence[int]]
"""Tokens cached before, and tokens to run."""


class OneDevice:
    """Both halves of a model on one device; every sequence has `room` tokens of NaN at first."""

    def __init__(
        self,
        kernels: Launcher,
        spec: ModelSpec,
        attention: AttentionWeights,
        ffn: Sequence[FFNLayerWeights],
        geometry: PageGeometry,
        sequences: int,
        room: int,
    ) -> None:
        self.kernels, self.spec, self.attention, self.ffn, self.geometry = kernels, spec, attention, ffn, geometry
        self.device = attention.embed.device
        pages = geometry.num_pages(room)
        frames = sequences * pages * geometry.frames_per_page
        order = np.random.default_rng(3).permutation(frames) + 1
        self.tables = order.reshape(sequences, geometry.frames_per_page, pages).astype(np.int64)
        self.arena = torch.full((frames + 1, geometry.frame_bytes), 0xFF, dtype=torch.uint8, device=self.device)
        self._chunk_ffn = ChunkFFN(kernels, tuple(ffn))

    def fill(self, seed: int) -> None:
        """Give every slot a value."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        for frame in self.arena:
            values = torch.randn(len(frame) // 2, device=self.device, generator=generator)
            frame.copy_(values.bfloat16().view(torch.uint8))

    def decode(self, rows: Sequence[int], positions: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """(rows, vocabulary): logits of one token of each of these sequences."""
        tables = np.stack([self.tables[row].T for row in rows]).astype(np.int32)
        cache = PagedCache(
            frames=self.arena, frame_table=torch.from_numpy(tables).to(self.device), geometry=self.geometry
        )
        distinct = len(set(rows)) == len(rows)
        half = AttentionHalf(self.kernels, self.spec, self.attention, cache, len(rows), one_row_per_sequence=distinct)
        for buffer, values in (
            (half.token_ids, tokens),
            (half.positions, positions),
            (half.lengths, [position + 1 for position in positions]),
        ):
            buffer.copy_(torch.tensor(values, dtype=torch.int32))
        return UndividedDecoder(half, [FFNHalf(self.kernels, tuple(self.ffn), len(rows))]).step().clone()

    def prefill(self, prompts: Sequence[Prompt], piece_tokens: int | None = None) -> torch.Tensor:
        """(prompts, vocabulary): logits of each one's last token, run as a step of pieces; prompt n is sequence n."""
        counts = [len(tokens) for _, tokens in prompts]
        rows = ChunkRows(
            token_ids=np.concatenate([np.array(tokens, dtype=np.int64) for _, tokens in prompts]),
            positions=np.concatenate([np.arange(cached, cached + len(tokens)) for cached, tokens in prompts]),
            row_of_token=np.repeat(np.arange(len(prompts)), counts),
            tables=[self.tables[number] for number in range(len(prompts))],
        )
        plan = chunk_plan(sum(counts), 1, self.spec.num_layers, piece_tokens)
        half = ChunkHalf(self.kernels, self.spec, self.attention, self.arena, self.geometry, rows, plan)
        half.embed()
        for layer in range(self.spec.num_layers):
            for piece in plan.pieces:
                normed = half.attend(layer, piece)
                partial = torch.empty(normed.shape, dtype=torch.float32, device=self.device)
                self._chunk_ffn.run(layer, half.padded(piece), partial)
                half.add(layer, piece, [partial])
        return half.logits((np.cumsum(counts) - 1).tolist()).clone()


def tell(report: Report, name: str, is_same: bool, note: str = "") -> None:
    report.metric(name, float(is_same), limit=1.0, note=note)
    print(f"{name}: {'same bits' if is_same else 'DIFFERENT'} {note}", flush=True)


def decode_in_batches(report: Report, model: OneDevice, name: str, contexts: Sequence[int]) -> None:
    """One token's logits alone and in batches, beside sequences of other lengths."""
    model.fill(5)
    sequences = len(model.tables)
    for context in contexts:
        alone = model.decode([0], [context - 1], [17])[0]
        for batch in (2, 4, 8, 16, 32):
            if batch > sequences:
                continue
            place = batch // 2
            rows = [row + 1 for row in range(batch - 1)]
            rows.insert(place, 0)
            positions = [(context - 1) if row == 0 else (37 * row) % context for row in rows]
            tokens = [17 if row == 0 else 1000 + row for row in rows]
            together = model.decode(rows, positions, tokens)[place]
            note = f"largest difference {(together - alone).abs().max().item():.3g}"
            tell(report, f"decode_same_bits.{name}.{context}.b{batch}", torch.equal(alone, together), note)


def passes_as_decode(report: Report, model: OneDevice, name: str, tokens: Sequence[int]) -> None:
    """Tokens one after another, and as rows of one pass: logits of the last."""
    model.fill(5)
    for position, token in enumerate(tokens):
        single = model.decode([0], [100 + position], [token])[0]
    model.fill(5)
    count = len(tokens)
    rows = model.decode([0] * count, list(range(100, 100 + count)), tokens)[-1]
    note = f"largest difference {(rows - single).abs().max().item():.3g}"
    tell(report, f"pass_as_decode.{name}", torch.equal(single, rows), note)


def chunks(report: Report, model: OneDevice, name: str, vocab: int) -> None:
    """A prompt's last logits alone, beside others, and cut elsewhere."""
    rng = np.random.default_rng(2)
    one = rng.integers(1, vocab, size=3000).tolist()
    beside = rng.integers(1, vocab, size=700).tolist()
    alone = model.prefill([(0, one)])[0]
    cases: dict[str, tuple[list[list[Prompt]], int | None]] = {
        "again": ([[(0, one)]], None),
        "before_700": ([[(0, one), (0, beside)]], None),
        "pieces_of_1024": ([[(0, one)]], 1024),
        "in_two_steps": ([[(0, one[:2048])], [(2048, one[2048:])]], None),
    }
    for case, (steps, piece_tokens) in cases.items():
        found = [model.prefill(step, piece_tokens)[0] for step in steps][-1]
        note = f"largest difference {(found - alone).abs().max().item():.3g}"
        tell(report, f"chunk_same_bits.{name}.{case}", torch.equal(alone, found), note)


def products(report: Report, model: OneDevice, name: str) -> None:
    """The first 64 rows of a library's products, by the number of rows that they are run with."""
    layer, ffn = model.attention.layers[-1].attention, model.ffn[-1]
    weights = {
        label: weight
        for label in ("qkv", "o", "down", "q_b")
        if isinstance(weight := getattr(layer, label, None), torch.Tensor)
    }
    for label, weight in weights.items():
        x = torch.randn(PADDED_ROWS[-1], weight.shape[1], device=model.device).bfloat16()
        whole = linear(x, weight)[:64]
        differ = [rows for rows in PADDED_ROWS if not torch.equal(linear(x[:rows], weight)[:64], whole)]
        tell(report, f"product_same_bits.{name}.{label}", not differ, f"other bits with {differ} rows")
    if ffn.gate_up is None:
        return
    experts, _, hidden = ffn.gate_up.shape
    x = torch.randn(PADDED_ROWS[-1] * 8, hidden, device=model.device).bfloat16()
    ends = torch.arange(1, experts + 1, device=model.device, dtype=torch.int32) * 16
    base = grouped_linear(x[: experts * 16], ffn.gate_up, ends)[:16]
    differ = []
    for rows in (experts * 16 + 512, PADDED_ROWS[-1] * 8):
        more = ends.clone()
        more[1:] += rows - experts * 16
        differ += [] if torch.equal(grouped_linear(x[:rows], ffn.gate_up, more)[:16], base) else [rows]
    tell(report, f"product_same_bits.{name}.experts", not differ, f"other bits with {differ} rows")
