"""The KV pool's half of one decode step, kernel by kernel; it knows no peer.

    half.embed(token_ids)
    for layer in range(num_layers):
        rows = half.attend(layer)      # what the FFN ranks get
        half.add(layer, partials)      # what they gave back
    logits = half.logits()

Everything works on buffers of a fixed number of tokens, so that a step can be captured in a graph.
"""

from collections.abc import Generator, Iterator, Sequence

import torch

from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.absorb import absorb, takes_absorb
from crosspool.backends.cuda.kernels.attention import AttentionScratch, attention_decode
from crosspool.backends.cuda.kernels.attention_variants import num_splits
from crosspool.backends.cuda.kernels.combine import takes_up
from crosspool.backends.cuda.kernels.gemv import gemv
from crosspool.backends.cuda.kernels.norm import residual_norm
from crosspool.backends.cuda.kernels.params import GqaInput, MlaInput
from crosspool.backends.cuda.kernels.rope import RopeTable, gqa_input, mla_input
from crosspool.backends.cuda.kv_frames.cache import PagedCache
from crosspool.backends.cuda.kv_rank.exchange import TokenHome
from crosspool.backends.cuda.kv_rank.head_exchange import HeadHome
from crosspool.backends.cuda.loading.attention_weights import AttentionLayerWeights, GQAWeights, MLAWeights
from crosspool.backends.cuda.loading.weights import AttentionWeights
from crosspool.models.spec import GQASpec, MLASpec, ModelSpec

MAX_TOKENS = 32


class AttentionHalf:
    """One model's decode of exactly `tokens` rows, one token each.

    token_ids, positions, lengths: (tokens) int32, set before each step; lengths = positions + 1. A row that is not in
    use has position 0, length 1 and a frame table of zeros.
    one_row_per_sequence: the rows are of different sequences (decode, not a chunk of a prompt): a kernel less a layer.
    It may be set before a step, or before a step is captured.
    home: exchanges with other KV ranks where the model is split over several; set like the flag above.
    scratch: of passes that never run beside this one; used where it is large enough.
    """

    def __init__(
        self,
        kernels: Launcher,
        spec: ModelSpec,
        weights: AttentionWeights,
        cache: PagedCache,
        tokens: int,
        *,
        one_row_per_sequence: bool = False,
        scratch: AttentionScratch | None = None,
    ) -> None:
        self.one_row_per_sequence = one_row_per_sequence
        self.home: TokenHome | HeadHome | None = None
        if not 1 <= tokens <= MAX_TOKENS:
            raise ValueError(f"a decode step of {tokens} rows; these kernels take 1 to {MAX_TOKENS}")
        self._kernels, self.spec, self._weights, self.cache = kernels, spec, weights, cache
        device = weights.embed.device
        specs = {layer.attention for layer in spec.layers}
        self._splits = {attention: num_splits(attention, kernels.num_sms) for attention in specs}
        self._ropes = {attention.rope: RopeTable.allocate(attention.rope, tokens, device) for attention in specs}
        self.scratch = AttentionScratch.for_specs(specs, tokens, kernels.num_sms, device, scratch)
        self.token_ids, self.positions = (torch.zeros(tokens, dtype=torch.int32, device=device) for _ in range(2))
        self.lengths = torch.ones(tokens, dtype=torch.int32, device=device)
        self.residual = torch.empty(tokens, spec.hidden_size, dtype=torch.float32, device=device)
        self.normed = torch.empty(tokens, spec.hidden_size, dtype=torch.bfloat16, device=device)
        self.logits_out = torch.empty(tokens, spec.vocab_size, dtype=torch.float32, device=device)
        self._buffers: dict[tuple[int, ...], torch.Tensor] = {}

    def embed(self) -> None:
        """Residual stream from `token_ids`, angles from `positions`. Starts a step: waits for all before it."""
        residual_norm(
            self._kernels,
            self.residual,
            self._weights.layers[0].input_norm,
            self.normed,
            eps=self.spec.norm_eps,
            token_ids=self.token_ids,
            embed=self._weights.embed,
            overlap=False,
        )
        self.turn()

    def turn(self) -> None:
        """Angles from `positions`."""
        for rope in self._ropes.values():
            rope.update(self._kernels, self.positions)

    def attend(self, layer: int) -> torch.Tensor:
        """Attention of one layer onto the residual stream; returns the FFN's rows, normed: (tokens, hidden) bf16."""
        self.attend_only(layer)
        norm = self.norm_after_attention(layer)
        residual_norm(self._kernels, self.residual, norm, self.normed, eps=self.spec.norm_eps)
        return self.normed

    def attend_only(self, layer: int) -> None:
        """`attend` without its last norm, for callers that norm the rows on their way to another device."""
        for _ in self.attend_steps(layer):
            pass

    def attend_steps(self, layer: int) -> Iterator[None]:
        """`attend_only`, cut where other KV ranks must have answered."""
        weights, eps = self._weights.layers[layer], self.spec.norm_eps
        attention = weights.attention
        if isinstance(self.home, HeadHome):
            self.home.put(layer, self.residual, weights.input_norm, self.normed, eps)
        if isinstance(attention, GQAWeights):
            attended = yield from self._gqa(layer, weights, attention)
        else:
            attended = yield from self._mla(layer, weights, attention)
        gemv(self._kernels, attention.o, attended, self.residual, bias=attention.o_bias, residual=self.residual)
        if isinstance(self.home, HeadHome):
            norm = self.norm_after_attention(layer)
            yield from self.home.add(layer, self.residual, norm, self.normed, eps)

    def add(self, layer: int, partials: Sequence[torch.Tensor]) -> None:
        """Add the FFN's partial outputs in rank order, and norm for the next layer or the head."""
        norm = self.norm_after_ffn(layer)
        residual_norm(self._kernels, self.residual, norm, self.normed, eps=self.spec.norm_eps, partials=partials)

    def norm_after_attention(self, layer: int) -> torch.Tensor:
        return self._weights.layers[layer].post_attention_norm

    def norm_after_ffn(self, layer: int) -> torch.Tensor:
        """The next layer's, or the head's."""
        layers = self._weights.layers
        return layers[layer + 1].input_norm if layer + 1 < len(layers) else self._weights.final_norm

    def logits(self) -> torch.Tensor:
        """(tokens, vocabulary) fp32, after the last `add`."""
        gemv(self._kernels, self._weights.head, self.normed, self.logits_out)
        return self.logits_out

    def _gqa(
        self, layer: int, weights: AttentionLayerWeights, attention: GQAWeights
    ) -> Generator[None, None, torch.Tensor]:
        spec = weights.spec
        assert isinstance(spec, GQASpec)
        tokens = len(self.normed)
        qkv = self._buffer(1, tokens, attention.qkv.shape[0])
        gemv(self._kernels, attention.qkv, self.normed, qkv, bias=attention.qkv_bias)
        inputs = gqa_input(
            spec,
            self._ropes[spec.rope],
            qkv,
            q_norm=attention.q_norm,
            k_norm=attention.k_norm,
            eps=self.spec.norm_eps,
        )
        attended = self._buffer(2, tokens, spec.num_heads, spec.head_dim)
        yield from self._attention(spec, layer, inputs, attended, attention.sinks)
        return attended.view(tokens, -1)

    def _mla(
        self, layer: int, weights: AttentionLayerWeights, attention: MLAWeights
    ) -> Generator[None, None, torch.Tensor]:
        spec = weights.spec
        assert isinstance(spec, MLASpec)
        tokens, heads, lora = len(self.normed), spec.num_heads, spec.kv_lora_rank
        down = self._buffer(1, tokens, attention.down.shape[0])
        first = attention.down.shape[0] - spec.kv_elements_per_token
        q, q_latent = down[:, :first], self._buffer(3, tokens, heads, lora)
        if attention.q_b is None:
            self._queries(spec, attention.down, attention.key_up, self.normed, down, q_latent, bias=attention.down_bias)
        else:
            gemv(self._kernels, attention.down, self.normed, down, bias=attention.down_bias)
            query = self._buffer(2, tokens, heads * spec.qk_head_dim)
            self._queries(spec, attention.q_b, attention.key_up, q, query, q_latent, norm_weight=attention.q_a_norm)
            q = query
        inputs = mla_input(spec, self._ropes[spec.rope], q_latent, q, down[:, first:], kv_a_norm=attention.kv_a_norm)
        attended = self._buffer(5, tokens, heads, spec.v_head_dim)
        if not isinstance(self.home, TokenHome) and takes_up(self._kernels, attention.value_up, tokens):
            self._attend(spec, layer, inputs, attended, value_up=attention.value_up)
            return attended.view(tokens, -1)
        latent = self._buffer(4, tokens, heads, lora)
        yield from self._attention(spec, layer, inputs, latent, None)
        gemv(self._kernels, attention.value_up, latent, attended)
        return attended.view(tokens, -1)

    def _queries(
        self,
        spec: MLASpec,
        weight: torch.Tensor,
        key_up: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        q_latent: torch.Tensor,
        *,
        norm_weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        """y = weight x, which begins with the heads' queries; q_latent is what scores latents in their stead."""
        heads, head, kernels, eps = spec.num_heads, spec.qk_head_dim, self._kernels, spec.lora_norm_eps
        norms = norm_weight is not None
        if bias is None and takes_absorb(kernels, weight, key_up, len(x), head=head, norms=norms):
            absorb(kernels, weight, key_up, x, y, q_latent, norm_weight=norm_weight, norm_eps=eps)
            return
        gemv(kernels, weight, x, y, norm_weight=norm_weight, norm_eps=eps, bias=bias)
        by_head = y[:, : heads * head].unflatten(1, (heads, head))
        gemv(kernels, key_up, by_head[:, :, : spec.qk_nope_head_dim], q_latent)

    def _attention(
        self,
        spec: GQASpec | MLASpec,
        layer: int,
        inputs: GqaInput | MlaInput,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> Iterator[None]:
        if isinstance(self.home, TokenHome):
            yield from self.home.attend(spec, layer, inputs, out, self.scratch, self._splits[spec], sinks)
            return
        self._attend(spec, layer, inputs, out, sinks=sinks)

    def _attend(
        self,
        spec: GQASpec | MLASpec,
        layer: int,
        inputs: GqaInput | MlaInput,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        value_up: torch.Tensor | None = None,
    ) -> None:
        attention_decode(
            self._kernels,
            spec,
            inputs,
            self.cache,
            layer,
            self.positions,
            self.lengths,
            out,
            self.scratch,
            splits=self._splits[spec],
            one_row_per_sequence=self.one_row_per_sequence,
            sinks=sinks,
            value_up=value_up,
        )

    def _buffer(self, role: int, *shape: int) -> torch.Tensor:
        """A bf16 buffer that every layer with the same shape shares."""
        buffer = self._buffers.get((role, *shape))
        if buffer is None:
            buffer = torch.empty(shape, dtype=torch.bfloat16, device=self.normed.device)
            self._buffers[(role, *shape)] = buffer
        return buffer
