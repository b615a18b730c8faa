"""Train one demo model: a tokenizer, pre-training on all corpora, fine-tuning on one voice, a Hugging Face directory.

    python train.py --voice austen --corpora corpora --out out/austen

The three voices are independent: start three processes to train them together on one GPU.
"""

import argparse
import json
import logging
import math
import random
from pathlib import Path

import torch
from corpora import CORPUS_OF_VOICE, MIXTURE, Corpus, chats, load_corpora
from families import END_OF_TEXT, FAMILY_OF_VOICE, MAX_POSITIONS, SPECIAL_TOKENS, VOICES
from optimise import Recipe, Stream, finetune, held_out_nats, pretrain
from text_tokens import encode, encode_chats, train_tokenizer
from torch import Tensor
from training_model import prepare_for_training
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

logger = logging.getLogger("train")


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
