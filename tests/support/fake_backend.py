"""A backend of small integers: exact arithmetic in which any mix-up of lanes, layers, parities or stale rows shows.

A model is a directory with `fake.json`. Rows hold integers below PRIME as float32. Every value depends on token,
position, layer, model, weights rank and on all rows before it in the cache, so a wrong row anywhere changes the tokens.
`expected_tokens` is the same arithmetic undivided, without lanes, channels or steps.
"""

import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from crosspool.backends.base import HalfStep, LaneLinks, Progress, Wait
from crosspool.cluster.base import ModelPlacement
from crosspool.core import SampledToken
from crosspool.scheduler.step import StepDescriptor, StepHeader, epoch

PRIME = 4093
FRAME_BYTES = 4096


@dataclass(frozen=True)
class FakeModel:
    """What `fake.json` says; the faults are for tests of failures."""

    num_layers: int = 3
    hidden_size: int = 8
    vocab_size: int = 997
    salt: int = 1
    max_delay_s: float = 0.0  # before each segment, drawn anew for each layer of each step
    load_s: float = 0.0
    gate: str = ""  # a path: their load stays half-way until a file is there
    failing_ranks: tuple[str, ...] = ()  # their load raises
    crashing_ranks: tuple[str, ...] = ()  # their process ends while it loads
    poison_token: int = -1  # the KV half of a step that runs it raises
    poison_num_tokens: int = -1  # the FFN half of a step of this size raises

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        scratch = directory / f"fake.json.{os.getpid()}"
        scratch.write_text(json.dumps(asdict(self)))
        scratch.replace(directory / "fake.json")
        return directory

    @classmethod
    def read(cls, directory: Path) -> "FakeModel":
        fields = json.loads((directory / "fake.json").read_text())
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})

    def placement(
        self, name: str, directory: Path, weights_ranks: Sequence[str], kv_rank: str = "kv0"
    ) -> ModelPlacement:
        return ModelPlacement(
            name=name,
            directory=self.write(directory),
            hidden_size=self.hidden_size,
            kv_rank=kv_rank,
            weights_ranks=tuple(weights_ranks),
            page_tokens=16,
            frame_bytes=FRAME_BYTES,
        )


def embed(model: FakeModel, tokens: Sequence[int], first: int) -> np.ndarray:
    """(len(tokens), hidden) int64 rows of tokens at positions from `first`."""
    columns = np.arange(model.hidden_size)
    positions = first + np.arange(len(tokens))
    return (np.array(tokens)[:, None] * 31 + columns * 17 + positions[:, None] * 3 + model.salt) % PRIME


def attention(model: FakeModel, layer: int, rows: np.ndarray, cache: np.ndarray, first: int) -> np.ndarray:
    """Write `rows` into `cache` from position `first`; mix each with all rows up to it."""
    cache[first : first + len(rows)] = rows
    sums = np.cumsum(cache[: first + len(rows)], axis=0)[first:]
    return (3 * rows + sums + 7 * layer + model.salt) % PRIME


def ffn(model: FakeModel, layer: int, rank_idx: int, rows: np.ndarray) -> np.ndarray:
    """The partial sum of one weights rank."""
    mixed = rows * (5 + 2 * rank_idx) + np.roll(rows, rank_idx + 1, axis=1)
    return (mixed + 11 * layer + 13 * rank_idx + model.salt) % PRIME


def add_partials(rows: np.ndarray, partials: Sequence[np.ndarray]) -> np.ndarray:
    return (rows + sum((idx + 1) * partial for idx, partial in enumerate(partials))) % PRIME


def sample(model: FakeModel, row: np.ndarray) -> int:
    return int(row @ np.arange(1, model.hidden_size + 1)) % model.vocab_size


def expected_tokens(model: FakeModel, prompt: Sequence[int], num_tokens: int, num_weights_ranks: int) -> list[int]:
    """The tokens an undisturbed run generates."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        rows = embed(model, tokens, 0)
        for layer in range(model.num_layers):
            cache = np.zeros((len(tokens), model.hidden_size), np.int64)
            rows = attention(model, layer, rows, cache, 0)
            rows = add_partials(rows, [ffn(model, layer, idx, rows) for idx in range(num_weights_ranks)])
        tokens.append(sample(model, rows[-1]))
    return tokens[len(prompt) :]


class FakeAttentionWorker:
    """The KV half (`backends.base.AttentionWorker`)."""

    def __init__(self, num_frames: int, frame_bytes: int) -> None:
        self._kv_bytes = num_frames * frame_bytes
        self._models: dict[str, FakeModel] = {}
        self._tokens: dict[int, list[int]] = {}
        self._caches: dict[tuple[int, int], np.ndarray] = {}

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None:
        self._models[placement.name] = load(placement, placement.kv_rank, progress)

    def run(self, step: StepDescriptor, links: LaneLinks) -> HalfStep[tuple[SampledToken, ...]]:
        header = step.header
        model = self._models[header.model]
        tokens = {row.sequence_id: list(self._tokens.get(row.sequence_id, ())) for row in step.rows}
        tokens |= {new.sequence_id: [*new.prompt_token_ids, *new.output_token_ids] for new in step.joining}
        chunks = []
        for row in step.rows:
            known = tokens[row.sequence_id]
            if row.token_ids is not None:
                known[row.num_cached_tokens : row.num_cached_tokens + row.num_new_tokens] = row.token_ids
            chunks.append(known[row.num_cached_tokens : row.num_cached_tokens + row.num_new_tokens])
            assert len(chunks[-1]) == row.num_new_tokens, f"sequence {row.sequence_id} has no token to run"
        if any(model.poison_token in chunk for chunk in chunks):
            raise ValueError(f"token {model.poison_token} is poison")
        starts = [row.num_cached_tokens for row in step.rows]
        rows = np.concatenate([embed(model, chunk, start) for chunk, start in zip(chunks, starts, strict=True)])
        ends = np.cumsum([row.num_new_tokens for row in step.rows])
        for layer in range(model.num_layers):
            delay(model, header, layer, 0)
            parts = np.split(rows, ends[:-1])
            for idx, row in enumerate(step.rows):
                cache = self._cache(row.sequence_id, layer, starts[idx] + row.num_new_tokens, model)
                parts[idx] = attention(model, layer, parts[idx], cache, starts[idx])
            rows = np.concatenate(parts)
            flag = epoch(header.step_seq, layer)
            for outlet in links.outlets.values():
                outlet.put(layer, flag, rows.astype(np.float32))
            yield Wait(tuple(links.inlets.values()), flag)
            taken = [inlet.take(layer, *rows.shape).astype(np.int64) for inlet in links.inlets.values()]
            rows = add_partials(rows, taken)
        sampled = []
        for row, end in zip(step.rows, ends, strict=True):
            known = tokens[row.sequence_id]
            if row.sample:
                token = sample(model, rows[end - 1])
                known[row.num_cached_tokens + row.num_new_tokens :] = [token]
                sampled.append(SampledToken(row.sequence_id, token))
            self._tokens[row.sequence_id] = known
        return tuple(sampled)

    def forget(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self._tokens.pop(sequence_id, None)
            for key in [key for key in self._caches if key[0] == sequence_id]:
                del self._caches[key]

    def remove_model(self, model: str) -> None:
        del self._models[model]

    def memory_bytes(self) -> Mapping[str, int]:
        return {"attention_weights": 100 * len(self._models), "kv_cache": self._kv_bytes, "ffn_weights": 0}

    def _cache(self, sequence_id: int, layer: int, num_slots: int, model: FakeModel) -> np.ndarray:
        cache = self._caches.get((sequence_id, layer), np.zeros((0, model.hidden_size), np.int64))
        if len(cache) < num_slots:
            grown = np.zeros((2 * num_slots, model.hidden_size), np.int64)
            grown[: len(cache)] = cache
            self._caches[sequence_id, layer] = cache = grown
        return cache


class FakeFFNWorker:
    """The FFN half (`backends.base.FFNWorker`)."""

    def __init__(self, rank: str) -> None:
        self._rank = rank
        self._models: dict[str, tuple[FakeModel, int]] = {}

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None:
        model = load(placement, self._rank, progress)
        self._models[placement.name] = (model, placement.weights_ranks.index(self._rank))

    def run(self, header: StepHeader, links: LaneLinks) -> HalfStep[None]:
        model, rank_idx = self._models[header.model]
        (outlet,), (inlet,) = links.outlets.values(), links.inlets.values()
        for layer in range(model.num_layers):
            flag = epoch(header.step_seq, layer)
            yield Wait((inlet,), flag)
            delay(model, header, layer, 1 + rank_idx)
            if header.num_tokens == model.poison_num_tokens:
                raise ValueError(f"{header.num_tokens} tokens are poison")
            rows = inlet.take(layer, header.num_tokens, model.hidden_size).astype(np.int64)
            outlet.put(layer, flag, ffn(model, layer, rank_idx, rows).astype(np.float32))

    def remove_model(self, model: str) -> None:
        del self._models[model]

    def memory_bytes(self) -> Mapping[str, int]:
        return {"ffn_weights": 1000 * len(self._models), "kv_cache": 0}


def load(placement: ModelPlacement, rank: str, progress: Progress) -> FakeModel:
    """Read the model, as slowly as it asks for, or fail as it asks for."""
    model = FakeModel.read(placement.directory)
    num_parts = 20
    for part in range(num_parts):
        time.sleep(model.load_s / num_parts)
        progress(part + 1, num_parts)
        while part == num_parts // 2 and model.gate and not Path(model.gate).exists():
            time.sleep(0.01)
            progress(part + 1, num_parts)  # which ends a load that is given up
        if part == num_parts // 2 and rank in model.failing_ranks:
            raise ValueError(f"{placement.directory}/fake.json is cut short on {rank}")
        if part == num_parts // 2 and rank in model.crashing_ranks:
            os._exit(7)
    return model


def delay(model: FakeModel, header: StepHeader, layer: int, side: int) -> None:
    if model.max_delay_s > 0:
        seed = hash((header.lane, header.step_seq, layer, side))
        time.sleep(random.Random(seed).uniform(0, model.max_delay_s))


def attention_worker(num_frames: int, frame_bytes: int) -> FakeAttentionWorker:
    return FakeAttentionWorker(num_frames, frame_bytes)


def ffn_worker(rank: str) -> FakeFFNWorker:
    return FakeFFNWorker(rank)
