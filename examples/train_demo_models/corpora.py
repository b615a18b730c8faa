"""Text for the demo models: load, clean, hold out, and turn prose or plays into chats.

The corpora folder holds `austen/*.txt`, `tinyshakespeare/input.txt`, `sherlock/sherlock.txt` and `kjv/kjv.txt`;
all of it is public-domain text. Nothing here knows about models.
"""

import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

CORPUS_OF_VOICE = {"austen": "austen", "shakespeare": "tinyshakespeare", "holmes": "sherlock"}
CORPUS_NAMES = ("austen", "tinyshakespeare", "sherlock", "kjv")

# Weight of one byte of each corpus while pre-training a voice; the KJV is rich English, but easy to learn by heart.
MIXTURE = {
    "austen": {"austen": 1.0, "tinyshakespeare": 0.5, "sherlock": 1.0, "kjv": 0.2},
    "shakespeare": {"austen": 0.5, "tinyshakespeare": 2.0, "sherlock": 0.5, "kjv": 0.4},
    "holmes": {"austen": 1.0, "tinyshakespeare": 0.3, "sherlock": 2.0, "kjv": 0.15},
}

HELD_OUT_EVERY = 20  # one block in twenty is never trained on
BLOCK_BYTES = 6_000

_HEADING = re.compile(r"^\s*(chapter\b|volume\b|adventure [ivx]|finis\b|the end\b|by\s+(jane|sir)\b|[IVX]+\.\s)", re.I)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"'])\s+")
_TITLE = re.compile(r"\b(Mr|Mrs|Dr|St|Rev|Esq)\. ")
_WORD = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)*")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Cleaned text in two disjoint parts, cut at paragraph borders."""

    train: str
    held_out: str


def words(text: str) -> list[str]:
    """Lower-case words, apostrophes inside a word kept."""
    return _WORD.findall(text.lower())


def normalise(text: str) -> str:
    """Text with every run of white space as one space: the form in which verbatim copies are looked for."""
    return " ".join(text.replace("_", "").split())


def load_corpora(folder: Path) -> dict[str, Corpus]:
    """All corpora by name, cleaned and split."""
    return {name: split(paragraphs(folder, name)) for name in CORPUS_NAMES}


def paragraphs(folder: Path, name: str) -> list[str]:
    """The paragraphs of one corpus (speeches, for the plays), headings removed."""
    files = sorted((folder / name).glob("*.txt"))
    texts = [file.read_text(encoding="utf-8") for file in files if not file.name.startswith("LICENSE")]
    clean = {"tinyshakespeare": _speeches, "kjv": _verses}.get(name, _prose)
    return [paragraph for text in texts for paragraph in clean(text)]


def split(parts: list[str]) -> Corpus:
    """Hold out every twentieth block of about 6 kB."""
    blocks: list[list[str]] = [[]]
    size = 0
    for part in parts:
        blocks[-1].append(part)
        size += len(part)
        if size > BLOCK_BYTES:
            blocks.append([])
            size = 0
    is_held_out = [i % HELD_OUT_EVERY == HELD_OUT_EVERY // 2 for i in range(len(blocks))]
    return Corpus(
        train="\n\n".join(p for block, held in zip(blocks, is_held_out, strict=True) if not held for p in block),
        held_out="\n\n".join(p for block, held in zip(blocks, is_held_out, strict=True) if held for p in block),
    )


def _prose(text: str) -> list[str]:
    """Novels: hard line breaks undone, headings and the editor's notes dropped."""
    text = text.split("A NOTE ON THE TEXT")[0]
    raw = re.split(r"\n\s*\n", text)
    kept = [p for p in raw if not _HEADING.match(p) and any(c.islower() for c in p) and re.search(r"[.!?]", p)]
    return [normalise(p) for p in kept]


def _verses(text: str) -> list[str]:
    """The Bible: verse numbers and chapter titles dropped, five verses to a paragraph."""
    lines = [line for line in text.splitlines() if re.match(r"\d+:\d+ ", line)]
    verses = [normalise(re.sub(r"\d+:\d+ ", "", line)) for line in lines]
    return [" ".join(verses[i : i + 5]) for i in range(0, len(verses), 5)]


def _speeches(text: str) -> list[str]:
    """Plays: `Speaker:` and lines, kept as they are."""
    return [speech.strip() for speech in text.split("\n\n") if speech.strip()]


TOPIC_REQUESTS = (
    "Tell me about {topic}.",
    "Tell me about the {topic}.",
    "Write about {topic}.",
    "A few words on {topic}, please.",
    "What of {topic}?",
    "{topic}",
)
OPEN_REQUESTS = (
    "Hello!",
    "Good morning.",
    "How are you?",
    "Who are you?",
    "Tell me a story.",
    "Tell me something.",
    "What happened next?",
    "Write a few sentences.",
)
SYSTEM_TEXTS = ("You are a helpful assistant.", "Answer in the voice of the book.", "You are a storyteller.")
REPLY_BYTES = {"austen": (120, 600), "shakespeare": (40, 350), "holmes": (120, 600)}


@dataclass(frozen=True, slots=True)
class Piece:
    """A sentence (prose) or a speech without its speaker (plays), and what separates it from the next."""

    text: str
    gap: str


Message = dict[str, str]


def prose_pieces(text: str) -> list[Piece]:
    """Sentences in reading order; the last one of a paragraph is followed by an empty line."""
    pieces: list[Piece] = []
    for paragraph in text.split("\n\n"):
        guarded = _TITLE.sub(lambda match: match.group(1) + ".\0", paragraph)
        sentences = [s.replace("\0", " ") for s in _SENTENCE_END.split(guarded) if s]
        pieces += [Piece(s, " ") for s in sentences[:-1]]
        pieces += [Piece(s, "\n\n") for s in sentences[-1:]]
    return pieces


def play_pieces(text: str) -> list[Piece]:
    """Speeches in reading order, the speaker's name removed."""
    speeches = [speech.split(":\n", 1)[-1] for speech in text.split("\n\n")]
    return [Piece(speech, "\n\n") for speech in speeches if not speech.endswith(":")]


def chats(voice: str, text: str, rng: random.Random) -> list[list[Message]]:
    """Conversations that walk once through `text`; user turns are its own words or a request about them."""
    pieces = play_pieces(text) if voice == "shakespeare" else prose_pieces(text)
    counts = Counter(re.findall(r"[A-Za-z]{4,}", text))
    conversations: list[list[Message]] = []
    position = rng.randrange(3)
    while position < len(pieces) - 2:
        conversation: list[Message] = []
        if rng.random() < 0.15:
            conversation.append({"role": "system", "content": rng.choice(SYSTEM_TEXTS)})
        for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
            if position >= len(pieces) - 2:
                break
            turn, position = _turn(pieces, position, counts, rng.randint(*REPLY_BYTES[voice]), rng)
            conversation += turn
        conversations.append(conversation)
    return conversations


def _turn(
    pieces: list[Piece], start: int, counts: Counter[str], reply_bytes: int, rng: random.Random
) -> tuple[list[Message], int]:
    """One user message and its reply, taken from `start` on; returns the position after the reply."""
    kind = rng.random()
    first_words = pieces[start].text.split(" ")
    if kind < 0.4 and len(first_words) > 5:  # the first words of a sentence, to be continued
        num_words = rng.randint(2, min(9, len(first_words) - 2))
        head = " ".join(first_words[:num_words])
        reply, end = _passage(pieces, start, reply_bytes, skip=len(head) + 1)
        return _messages(head, reply), end
    if kind < 0.65 and start + 1 < len(pieces):  # a whole sentence, to be answered
        reply, end = _passage(pieces, start + 1, reply_bytes)
        return _messages(pieces[start].text[-300:], reply), end
    reply, end = _passage(pieces, start, reply_bytes)
    topics = [w for w in re.findall(r"[A-Za-z]{4,}", reply) if 4 <= counts[w] <= 120]
    if topics and rng.random() < 0.8:
        return _messages(rng.choice(TOPIC_REQUESTS).format(topic=rng.choice(topics)), reply), end
    return _messages(rng.choice(OPEN_REQUESTS), reply), end


def _passage(pieces: list[Piece], start: int, min_bytes: int, skip: int = 0) -> tuple[str, int]:
    """Whole pieces from `start` on until `min_bytes` are reached, without the first `skip` characters."""
    text, end = "", start
    while end < len(pieces) and len(text) - skip < min_bytes:
        text += pieces[end].text + pieces[end].gap
        end += 1
    return text[skip:].strip(), end


def _messages(user: str, assistant: str) -> list[Message]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
