"""A voice's tokenizer, and text and chats as token ids."""

import math

import torch
from corpora import MIXTURE, Corpus, Message
from families import CHAT_TEMPLATE, END_OF_TEXT, MAX_POSITIONS, SPECIAL_TOKENS, VOCAB_SIZE
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast


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
