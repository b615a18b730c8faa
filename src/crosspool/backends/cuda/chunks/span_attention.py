"""The library's attention of a span, in its few fixed sizes: planned and captured once, replayed for every prompt.

Planning a size takes a tenth of a second and each call half a millisecond of the host, during which no other lane is
served; a replay takes a hundredth of that. A captured kernel keeps to the multiprocessors of the stream that it was
captured on, so there is a graph for the whole device and one for its partition.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from crosspool.backends.cuda.chunks.prefill_blocks import SpanSizes
from crosspool.backends.cuda.device.graphs import CAPTURING
from crosspool.backends.cuda.steps.lane_memory import LaneMemory
from crosspool.models.spec import GQASpec, MLASpec

Part = tuple[torch.Tensor, torch.Tensor]
"""(rows, heads, D_v) and the log of softmax's sums (heads, rows) fp32."""


@dataclass(frozen=True, slots=True)
class SpanBuffers:
    """Where a span's operands lie. q: (rows, heads, D); keys: (kv_heads, count, D); values: (kv_heads, count, D_v).

    slots: (count, elements of a slot): GQA's keys and values are views of it.
    """

    q: torch.Tensor
    slots: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def allocate(cls, spec: GQASpec | MLASpec, sizes: SpanSizes, device: torch.device) -> "SpanBuffers":
        rows, count = sizes.rows[-1], sizes.keys[0]

        def empty(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.bfloat16, device=device)

        slots = empty(count, spec.kv_elements_per_token)
        if isinstance(spec, MLASpec):
            keys = empty(spec.num_heads, count, spec.qk_head_dim)
            values = empty(spec.num_heads, count, spec.v_head_dim)
            return cls(empty(rows, spec.num_heads, spec.qk_head_dim), slots, keys, values)
        pair = slots.unflatten(1, (2, spec.num_kv_heads, spec.head_dim)).permute(1, 2, 0, 3)
        return cls(empty(rows, spec.num_heads, spec.head_dim), slots, pair[0], pair[1])


@dataclass
class SpanGraphs:
    """One model's spans of one shape. One chunk at a time may use them; others call the library.

    user: the lane of that chunk. One that was given up keeps them until the lane is drained: its kernels write to the
    same buffers.
    """

    spec: GQASpec | MLASpec
    buffers: SpanBuffers
    user: LaneMemory | None = None
    _graphs: dict[tuple[int, int, bool], tuple[Any, Part]] = field(default_factory=dict)
    _pool: Any = None

    @property
    def is_free(self) -> bool:
        return self.user is None or self.user.is_drained

    @classmethod
    def capture(
        cls, spec: GQASpec | MLASpec, sizes: SpanSizes, device: torch.device, streams: Mapping[bool, Any]
    ) -> "SpanGraphs":
        """streams: of the whole device (False) and of its partition (True), on which nothing else runs now."""
        made = cls(spec, SpanBuffers.allocate(spec, sizes, device))
        made._pool = torch.cuda.graph_pool_handle()
        torch.cuda.current_stream(device).synchronize()
        for is_shared, stream in streams.items():
            for rows in sizes.rows:
                for count in sizes.keys:
                    with CAPTURING, torch.cuda.stream(stream):
                        made._run(rows, count)  # plans it
                        graph = torch.cuda.CUDAGraph()
                        graph.capture_begin(pool=made._pool, capture_error_mode="thread_local")
                        try:
                            part = made._run(rows, count)
                        finally:
                            graph.capture_end()
                    made._graphs[rows, count, is_shared] = (graph, part)
            with CAPTURING:  # another load may be capturing on this stream
                stream.synchronize()
        return made

    def replay(self, rows: int, count: int, is_shared: bool) -> Part:
        """Attention of the first `rows` queries of the buffers to the first `count` keys, on torch's current stream.

        The result is overwritten by the next replay.
        """
        graph, part = self._graphs[rows, count, is_shared]
        graph.replay()
        return part

    def _run(self, rows: int, count: int) -> Part:
        held = self.buffers
        return full_attention(held.q[:rows], held.keys[:, :count], held.values[:, :count], self.spec.softmax_scale)


def full_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> Part:
    """Every row of q (rows, heads, D) to every key (kv_heads, count, D): no mask."""
    rows = q.transpose(0, 1).unsqueeze(0)
    k, v = keys.unsqueeze(0), values.unsqueeze(0)
    if q.device.type == "cuda":
        with CAPTURING:
            out, log_sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                rows, k, v, None, True, 0.0, False, False, scale=scale
            )
        return out[0].transpose(0, 1), log_sums.view(q.shape[1], q.shape[0])
    group = q.shape[1] // keys.shape[0]
    k, v = (part.float().repeat_interleave(group, 1) for part in (k, v))
    scores = rows.float() @ k.transpose(2, 3) * scale
    out = (scores.softmax(-1) @ v).to(q.dtype)
    return out[0].transpose(0, 1), scores.logsumexp(-1)[0].contiguous()
