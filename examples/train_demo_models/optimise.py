"""Pre-training and fine-tuning of one model; the weights with the best held-out loss are kept."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from families import MAX_POSITIONS, SPECIAL_TOKENS
from torch import Tensor, nn
from training_model import Routing
from transformers import PreTrainedModel

logger = logging.getLogger("train")

AUX_LOSS_WEIGHT = 0.01
BIAS_STEP = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Hyperparameters of one voice; every time is wall clock, so that a run ends when it should."""

    pretrain_s: float
    pretrain_lr: float = 2e-3
    finetune_s: float
    finetune_lr: float = 5e-4
    finetune_epochs: float = 3.0
    window: int = MAX_POSITIONS
    batch: int = 16
    dropout: float = 0.1
    weight_decay: float = 0.1
    evaluate_every: int = 100
    patience: int = 5


@dataclass(slots=True)
class Stream:
    """Token streams with the probability of drawing a window from each."""

    tokens: list[Tensor]
    probabilities: Tensor

    def draw(self, batch: int, window: int) -> Tensor:
        """(batch, window + 1) token ids from random places."""
        chosen = torch.multinomial(self.probabilities, batch, replacement=True).tolist()
        starts = torch.rand(batch).tolist()
        rows = []
        for index, start in zip(chosen, starts, strict=True):
            tokens = self.tokens[index]
            first = int(start * (tokens.numel() - window - 1))
            rows.append(tokens[first : first + window + 1])
        return torch.stack(rows)


def optimizer_for(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW; norms do not decay."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=params[0].is_cuda)


def autocast(device: str) -> torch.autocast:
    """bf16 matrix products on a GPU, plain fp32 on a CPU."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")


def learned_targets(tokens: Tensor) -> Tensor:
    """Which next tokens count: all but those of system and user turns. (batch, window), bool."""
    inputs = tokens[:, :-1]
    positions = torch.arange(inputs.shape[1], device=tokens.device)
    is_special = inputs < len(SPECIAL_TOKENS)
    last_special = torch.where(is_special, positions, 0).cummax(dim=1).values
    roles = inputs.gather(1, last_special)
    return (roles != SPECIAL_TOKENS.index("<|user|>")) & (roles != SPECIAL_TOKENS.index("<|system|>"))


def summed_loss(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of the tokens that count, nats, summed; and their number."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    losses = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    learned = learned_targets(tokens).flatten()
    return (losses * learned).sum(), learned.sum()


@torch.no_grad()
def held_out_nats(model: PreTrainedModel, tokens: Tensor, window: int, device: str) -> float:
    """Mean cross entropy per token of a held-out stream, in windows that do not overlap."""
    was_training = model.training
    model.eval()
    rows = [tokens[start : start + window + 1] for start in range(0, tokens.numel() - 1, window)]
    batches = [torch.stack(rows[i : min(i + 32, len(rows) - 1)]) for i in range(0, len(rows) - 1, 32)]
    sums = []
    for batch in [*batches, rows[-1][None]]:
        with autocast(device):
            sums.append(torch.stack(summed_loss(model, batch)))
    model.train(was_training)
    total, count = torch.stack(sums).double().sum(0).tolist()
    return total / count


def train_step(model: PreTrainedModel, routing: Routing, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    """One optimiser step; returns the cross entropy, not yet synchronised."""
    routing.clear()
    with autocast(tokens.device.type):
        total_loss, count = summed_loss(model, tokens)
        loss = total_loss / count
    has_bias = hasattr(routing.gates[0], "e_score_correction_bias")
    total = loss if has_bias else loss + AUX_LOSS_WEIGHT * routing.aux_loss()
    total.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if has_bias:
        with torch.no_grad():
            routing.move_biases(BIAS_STEP)
    return loss.detach()


@dataclass(slots=True)
class Best:
    """The best held-out loss so far and the weights that reached it."""

    loss: float = math.inf
    state: dict[str, Tensor] = field(default_factory=dict)
    num_worse: int = 0

    def offer(self, loss: float, model: nn.Module) -> None:
        if loss < self.loss:
            self.loss, self.num_worse = loss, 0
            self.state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        else:
            self.num_worse += 1


def pretrain(
    model: PreTrainedModel, routing: Routing, recipe: Recipe, stream: Stream, score: Callable[[], float]
) -> None:
    """Warm up, stay at the peak rate for 30 % of the time, then decay to zero; the best held-out loss is kept."""
    optimizer = optimizer_for(model, recipe.pretrain_lr, recipe.weight_decay)
    best = Best()
    start_s = time.monotonic()
    step = 0
    while (elapsed_s := time.monotonic() - start_s) < recipe.pretrain_s and best.num_worse < recipe.patience:
        remaining = min(1.0, (1 - elapsed_s / recipe.pretrain_s) / 0.7)
        set_lr(optimizer, recipe.pretrain_lr * min(remaining, (step + 1) / 100))
        train_step(model, routing, optimizer, stream.draw(recipe.batch, recipe.window))
        step += 1
        if step % recipe.evaluate_every == 0:
            best.offer(score(), model)
            report("pretrain", step, elapsed_s, remaining, best, routing)
    best.offer(score(), model)
    report("pretrain", step, elapsed_s, 0.0, best, routing)
    model.load_state_dict(best.state)


def finetune(
    model: PreTrainedModel, routing: Routing, recipe: Recipe, stream: Stream, score: Callable[[], float]
) -> None:
    """A linear decay over a few epochs of the voice; the best held-out loss is kept."""
    num_tokens = sum(tokens.numel() for tokens in stream.tokens)
    num_steps = max(1, int(recipe.finetune_epochs * num_tokens / (recipe.batch * recipe.window)))
    optimizer = optimizer_for(model, recipe.finetune_lr, recipe.weight_decay)
    best = Best()
    start_s = time.monotonic()
    for step in range(num_steps):
        elapsed_s = time.monotonic() - start_s
        if elapsed_s > recipe.finetune_s:
            break
        remaining = 1 - max(step / num_steps, elapsed_s / recipe.finetune_s)
        set_lr(optimizer, recipe.finetune_lr * min(remaining, (step + 1) / 20))
        train_step(model, routing, optimizer, stream.draw(recipe.batch, recipe.window))
        if (step + 1) % max(1, num_steps // 12) == 0:
            best.offer(score(), model)
            report("finetune", step + 1, elapsed_s, remaining, best, routing)
    best.offer(score(), model)
    model.load_state_dict(best.state)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Same rate for all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def report(stage: str, step: int, elapsed_s: float, remaining: float, best: Best, routing: Routing) -> None:
    """One log line: where the stage stands, and how uneven the experts' load is (1 is even)."""
    peak_load = max((load.max().item() * load.numel() for load in routing.loads()), default=0.0)
    logger.info(
        "%s step=%d elapsed_s=%.1f remaining=%.2f best_nats=%.4f worse=%d peak_load=%.2f",
        stage, step, elapsed_s, remaining, best.loss, best.num_worse, peak_load,
    )  # fmt: skip
