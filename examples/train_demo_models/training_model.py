"""A model while it is trained: the same function in fewer and larger kernels, dropout, routers that are watched."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel


def dense_experts(self: nn.Module, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
    """All experts as one wide FFN whose unselected parts have weight zero: what the routed loop computes."""
    num_experts, hidden_size, expert_width = self.down_proj.shape
    weights_TE = topk_weights_TK.new_zeros(hidden_TD.shape[0], num_experts)
    weights_TE = weights_TE.scatter(1, topk_ids_TK, topk_weights_TK)
    gate_up = F.linear(hidden_TD, self.gate_up_proj.flatten(0, 1))
    gate, up = gate_up.view(-1, num_experts, 2, expert_width).unbind(2)
    activated = F.silu(gate) * up * weights_TE[..., None].to(gate.dtype)
    down = self.down_proj.permute(1, 0, 2).reshape(hidden_size, -1)
    return F.linear(activated.flatten(1), down)


def fused_rms_norm(self: nn.Module, hidden_states: Tensor) -> Tensor:
    """The family's RMSNorm in one kernel; the input in fp32, as the weight is, or torch falls back to many kernels."""
    return F.rms_norm(hidden_states.float(), self.weight.shape, self.weight, self.variance_epsilon)


@dataclass(slots=True)
class Routing:
    """What the routers of one forward pass chose; filled by hooks, one entry per MoE layer."""

    gates: list[nn.Module] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    topk_ids: list[Tensor] = field(default_factory=list)

    def record(self, gate: nn.Module, _inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        if gate.training:
            self.logits.append(outputs[0])
            self.topk_ids.append(outputs[2])

    def clear(self) -> None:
        self.logits.clear()
        self.topk_ids.clear()

    def loads(self) -> list[Tensor]:
        """Share of the routed tokens that each expert got, per layer; sums to 1."""
        layers = zip(self.gates, self.topk_ids, strict=True) if self.topk_ids else ()
        return [_shares(ids, gate.num_experts) for gate, ids in layers]

    def aux_loss(self) -> Tensor:
        """Switch-style balance loss for softmax routers: 1 where the load is even."""
        losses = [
            load.numel() * (load * logits.float().softmax(-1).mean(0)).sum()
            for load, logits in zip(self.loads(), self.logits, strict=True)
        ]
        return torch.stack(losses).mean()

    def move_biases(self, step: float) -> None:
        """Balance without a loss: raise the correction bias of experts with too little load, lower the others'."""
        for gate, load in zip(self.gates, self.loads(), strict=True):
            gate.e_score_correction_bias += step * torch.sign(1 / load.numel() - load)


def _shares(topk_ids: Tensor, num_experts: int) -> Tensor:
    """Share of each expert among the chosen ids; a comparison and a sum, because bincount waits for the GPU."""
    experts = torch.arange(num_experts, device=topk_ids.device)
    return (topk_ids.flatten()[:, None] == experts).float().mean(0)


def prepare_for_training(model: PreTrainedModel, dropout: float) -> Routing:
    """Swap in the fast forwards, add residual dropout, watch the routers."""
    routing = Routing()
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.forward = MethodType(dense_experts, module)
        elif type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(fused_rms_norm, module)
        elif name.endswith(".mlp.gate"):
            routing.gates.append(module)
            module.register_forward_hook(routing.record)
        if name.endswith((".self_attn", ".mlp", "embed_tokens")):
            module.register_forward_hook(_dropout_hook(dropout))
    return routing


def _dropout_hook(p: float) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    def hook(module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        if isinstance(output, tuple):
            return (F.dropout(output[0], p, module.training), *output[1:])
        return F.dropout(output, p, module.training)

    return hook
