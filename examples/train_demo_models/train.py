"""Train one demo model: a tokenizer, pre-training on all corpora, fine-tuning on one voice, a Hugging Face directory.

    python train.py --voice austen --corpora corpora --out out/austen

The three voices are independent: start three processes to train them together on one GPU.
"""

import argparse
import json
import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType

import torch
import torch.nn.functional as F
from corpora import CORPUS_OF_VOICE, MIXTURE, Corpus, Message, chats, load_corpora
from families import CHAT_TEMPLATE, END_OF_TEXT, FAMILY_OF_VOICE, MAX_POSITIONS, SPECIAL_TOKENS, VOCAB_SIZE, VOICES
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

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


# Tokenizer


def train_tokenizer(voice: str, corpora: dict[str, Corpus]) -> PreTrainedTokenizerFast:
    """Byte-level BPE on the training text, each corpus weighted as in pre-training; any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = []
    for name, weight in MIXTURE[voice].items():
        copies = math.ceil(weight)
        text = corpora[name].train
        texts += [text[: int(len(text) * weight / copies)]] * copies
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> Tensor:
    """Token ids of a text of any length, int64; in chunks of many paragraphs, which are encoded in parallel."""
    paragraphs = text.split("\n\n")
    chunks = ["\n\n".join([*paragraphs[i : i + 200], ""]) for i in range(0, len(paragraphs), 200)]
    encodings = tokenizer.backend_tokenizer.encode_batch(chunks)
    return torch.tensor([token for encoding in encodings for token in encoding.ids])


def render_chats(conversations: list[list[Message]]) -> str:
    """All conversations as the chat template writes them, an end-of-text token after each."""
    turns = [[f"<|{m['role']}|>\n{m['content']}<|end|>\n" for m in conversation] for conversation in conversations]
    return "".join("".join(conversation) + END_OF_TEXT for conversation in turns)


def encode_chats(tokenizer: PreTrainedTokenizerFast, conversations: list[list[Message]]) -> Tensor:
    """Token ids of the rendered conversations, one after the other."""
    encodings = tokenizer.backend_tokenizer.encode_batch([render_chats([c]) for c in conversations])
    return torch.tensor([token for encoding in encodings for token in encoding.ids])


# Training-only changes to a model: same function, fewer and larger kernels


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


# Optimisation


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


# The whole run


def pretrain_stream(voice: str, encoded: dict[str, Tensor]) -> Stream:
    """All corpora, in the voice's proportions."""
    mixture = MIXTURE[voice]
    sizes = torch.tensor([encoded[name].numel() * weight for name, weight in mixture.items()])
    return Stream([encoded[name] for name in mixture], sizes / sizes.sum())


def finetune_stream(
    voice: str, tokenizer: PreTrainedTokenizerFast, corpus: Corpus, plain: Tensor, rng: random.Random
) -> Stream:
    """The voice as plain text and as three different passes of chats, in equal parts per pass."""
    passes = [encode_chats(tokenizer, chats(voice, corpus.train, rng)) for _ in range(3)]
    tokens = [plain, *[p.to(plain.device) for p in passes]]
    return Stream(tokens, torch.tensor([0.4, 0.2, 0.2, 0.2]))


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """A bf16 Hugging Face directory; the router's correction bias stays fp32, as the family publishes it."""
    biases = {n: b.clone() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    model.to(torch.bfloat16)
    for name, bias in biases.items():
        model.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = bias
    end_ids = [SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index("<|end|>")]
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
        repetition_penalty=1.05,
        eos_token_id=end_ids,
        pad_token_id=end_ids[0],
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def run(voice: str, corpora_dir: Path, out: Path, recipe: Recipe, device: str, init: Path | None) -> None:
    """Train `voice`, from random weights or from the directory `init`, and write it to `out`."""
    torch.manual_seed(0)
    rng = random.Random(0)
    corpora = load_corpora(corpora_dir)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(init) if init else train_tokenizer(voice, corpora)
    encoded = {name: encode(tokenizer, corpus.train).to(device) for name, corpus in corpora.items()}
    held_out = {name: encode(tokenizer, corpus.held_out).to(device) for name, corpus in corpora.items()}
    held_out_text = corpora[CORPUS_OF_VOICE[voice]].held_out
    plain = held_out[CORPUS_OF_VOICE[voice]]
    chat = encode_chats(tokenizer, chats(voice, held_out_text, rng)).to(device)
    bits_per_byte = plain.numel() / len(held_out_text.encode()) / math.log(2)

    model = AutoModelForCausalLM.from_pretrained(init, dtype=torch.float32) if init else FAMILY_OF_VOICE[voice]()
    model.to(device).train()
    routing = prepare_for_training(model, recipe.dropout)

    def plain_nats() -> float:
        return held_out_nats(model, plain, recipe.window, device)

    def mean_nats() -> float:
        return (plain_nats() + held_out_nats(model, chat, recipe.window, device)) / 2

    if recipe.pretrain_s > 0:
        pretrain(model, routing, recipe, pretrain_stream(voice, encoded), plain_nats)
    before = plain_nats() * bits_per_byte
    stream = finetune_stream(voice, tokenizer, corpora[CORPUS_OF_VOICE[voice]], encoded[CORPUS_OF_VOICE[voice]], rng)
    finetune(model, routing, recipe, stream, mean_nats)
    result = {
        "voice": voice,
        "num_parameters": model.num_parameters(),
        "num_train_tokens": {name: tokens.numel() for name, tokens in encoded.items()},
        "held_out_bits_per_byte": {"pretrained": before, "finetuned": plain_nats() * bits_per_byte},
        "chat_held_out_nats_per_token": held_out_nats(model, chat, recipe.window, device),
    }
    logger.info("%s", json.dumps(result))
    save(model, tokenizer, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--voice", choices=VOICES, required=True)
    parser.add_argument("--corpora", type=Path, required=True, help="folder with austen/, tinyshakespeare/, ...")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=2.0, help="time for pre-training; 0 leaves it out")
    parser.add_argument("--finetune-minutes", type=float, default=0.7)
    parser.add_argument("--finetune-lr", type=float, default=5e-4)
    parser.add_argument("--init", type=Path, help="a directory written earlier, to go on from")
    parser.add_argument("--batch", type=int, default=16, help="windows in a batch")
    parser.add_argument("--window", type=int, default=MAX_POSITIONS, help="tokens in a window")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=f"{args.voice} %(message)s")
    recipe = Recipe(
        pretrain_s=60 * args.minutes,
        finetune_s=60 * args.finetune_minutes,
        finetune_lr=args.finetune_lr,
        batch=args.batch,
        window=args.window,
        dropout=args.dropout,
    )
    run(args.voice, args.corpora, args.out, recipe, args.device, args.init)


if __name__ == "__main__":
    main()
