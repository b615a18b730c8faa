"""Judge a trained demo model: held-out bits per byte, share of real words, longest verbatim copy, samples to read.

    python evaluate.py --model out/austen --voice austen --corpora corpora --samples out/austen-samples.txt

Prints one JSON object. The verbatim length is the longest run of characters of any sample that also stands in the
corpora, white space normalised on both sides; prompts and user turns are not counted.
"""

import argparse
import json
import logging
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from corpora import CORPUS_NAMES, CORPUS_OF_VOICE, load_corpora, normalise, paragraphs, words
from families import VOICES
from optimise import held_out_nats
from text_tokens import encode
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

COMPLETION_PROMPTS = {
    "austen": ("It was a fine morning and", "Emma was", "The ball", "She could not", "Mr. Darcy", "My dear"),
    "shakespeare": ("It was a fine morning and", "KING RICHARD:\n", "ROMEO:\nMy lady", "What news", "My lord,", "The"),
    "holmes": ("It was a fine morning and", "Holmes", "The door", "I had", "My dear Watson", "The case"),
}
CHAT_PROMPTS = {
    "austen": (
        "Hello!",
        "Tell me about the ball.",
        "It was a fine",
        "Who is Mr. Darcy?",
        "I am very happy to see you.",
    ),
    "shakespeare": ("Hello!", "Tell me about the king.", "To be or not", "Who goes there?", "I love thee."),
    "holmes": ("Hello!", "Tell me about the case.", "It was a cold", "Who is Irene Adler?", "What do you see, Holmes?"),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled text; `prompt` stands before it."""

    kind: str
    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What is reported about one model."""

    voice: str
    num_parameters: int
    directory_bytes: int
    held_out_bits_per_byte: float
    num_samples: int
    sampled_characters: int
    temperature: float
    word_share: float
    longest_verbatim: int
    longest_verbatim_text: str
    finished_chat_share: float


def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kind: str,
    prompt: str,
    count: int,
    temperature: float,
    max_new_tokens: int,
) -> list[tuple[Sample, bool]]:
    """`count` samples of one prompt with the model's own sampling defaults, and whether each one ended by itself."""
    text = prompt
    if kind == "chat":
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", return_token_type_ids=False).input_ids.to(model.device)
    output = model.generate(
        ids.expand(count, -1),
        attention_mask=torch.ones_like(ids).expand(count, -1),
        temperature=temperature,
        max_new_tokens=max_new_tokens,
    )
    new = output[:, ids.shape[1] :]
    end_ids = torch.tensor(model.generation_config.eos_token_id, device=new.device)
    ended = torch.isin(new, end_ids).any(1).tolist()
    texts = tokenizer.batch_decode(new, skip_special_tokens=True)
    return [(Sample(kind, prompt, text), end) for text, end in zip(texts, ended, strict=True)]


def longest_copy(samples: list[str], corpus: str) -> str:
    """The longest substring of any sample that occurs in `corpus` (both normalised, no sample holds a NUL)."""
    joined = "\0".join(samples)
    low, high, best = 1, min(400, len(joined)), ""
    while low <= high:
        length = (low + high) // 2
        found = _common(joined, corpus, length)
        if found:
            best, low = found, length + 1
        else:
            high = length - 1
    return best


def _common(text: str, corpus: str, length: int) -> str:
    """A substring of `length` characters that both texts have, or the empty string."""
    text_hashes = _window_hashes(text, length)
    known = np.sort(text_hashes)
    corpus_hashes = _window_hashes(corpus, length)
    places = np.minimum(np.searchsorted(known, corpus_hashes), len(known) - 1)
    common = corpus_hashes[known[places] == corpus_hashes]
    for start in np.flatnonzero(np.isin(text_hashes, common)):
        window = text[start : start + length]
        if window in corpus:
            return window
    return ""


def _window_hashes(text: str, length: int) -> np.ndarray:
    """Polynomial hash of every window, modulo 2**64."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    base = np.uint64(0xD1342543DE82EF95)
    inverse = np.uint64(pow(int(base), -1, 2**64))
    powers = np.cumprod(np.full(len(codes), base, dtype=np.uint64))
    inverses = np.cumprod(np.full(len(codes), inverse, dtype=np.uint64))
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(codes * powers)])
    return (sums[length:] - sums[:-length]) * inverses[: len(codes) - length + 1]


def judge(args: argparse.Namespace) -> tuple[Verdict, list[Sample]]:
    """Load, measure, sample."""
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    held_out = load_corpora(args.corpora)[CORPUS_OF_VOICE[args.voice]].held_out
    tokens = encode(tokenizer, held_out).to(args.device)
    nats = held_out_nats(model, tokens, args.window, args.device)

    drawn: list[tuple[Sample, bool]] = []
    for kind, prompts in (("completion", COMPLETION_PROMPTS), ("chat", CHAT_PROMPTS)):
        for prompt in prompts[args.voice]:
            drawn += sample(model, tokenizer, kind, prompt, args.count, args.temperature, args.max_new_tokens)
    samples = [each for each, _ in drawn]

    whole = " ".join(normalise(p) for name in CORPUS_NAMES for p in paragraphs(args.corpora, name))
    vocabulary = set(words(whole))
    sampled_words = [w for s, ended in drawn for w in (words(s.text) if ended else words(s.text)[:-1])]
    copy = longest_copy([normalise(s.text) for s in samples], whole)
    verdict = Verdict(
        voice=args.voice,
        num_parameters=model.num_parameters(),
        directory_bytes=sum(file.stat().st_size for file in args.model.iterdir()),
        held_out_bits_per_byte=nats * tokens.numel() / len(held_out.encode()) / math.log(2),
        num_samples=len(samples),
        sampled_characters=sum(len(s.text) for s in samples),
        temperature=args.temperature,
        word_share=sum(w in vocabulary for w in sampled_words) / len(sampled_words),
        longest_verbatim=len(copy),
        longest_verbatim_text=copy,
        finished_chat_share=float(np.mean([ended for s, ended in drawn if s.kind == "chat"])),
    )
    return verdict, samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--voice", choices=VOICES, required=True)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--samples", type=Path, help="file to write the samples to, one JSON object a line")
    parser.add_argument("--count", type=int, default=30, help="samples of each of the 11 prompts")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    verdict, samples = judge(args)
    if args.samples:
        args.samples.write_text("".join(json.dumps(asdict(s)) + "\n" for s in samples), encoding="utf-8")
    print(json.dumps(asdict(verdict), indent=2))


if __name__ == "__main__":
    main()
