"""A backend that computes nothing: what is left of a step is what the cluster costs.

A model is a directory with `layers.json`, the number of its layers. Rows cross as they are.
"""

import json
from collections.abc import Mapping, Sequence

import numpy as np

from crosspool.backends.base import HalfStep, LaneLinks, Progress, Wait
from crosspool.cluster.base import ModelPlacement
from crosspool.core import SampledToken
from crosspool.scheduler.step import StepDescriptor, StepHeader, epoch


class _Models:
    def __init__(self) -> None:
        self._models: dict[str, tuple[int, int]] = {}  # name -> layers, hidden size

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None:
        num_layers = json.loads((placement.directory / "layers.json").read_text())
        self._models[placement.name] = (num_layers, placement.hidden_size)

    def remove_model(self, model: str) -> None:
        del self._models[model]

    def memory_bytes(self) -> Mapping[str, int]:
        return {"ffn_weights": 0, "kv_cache": 0}


class NullAttentionWorker(_Models):
    """Puts the same rows in every layer and waits for them (`backends.base.AttentionWorker`)."""

    def run(self, step: StepDescriptor, links: LaneLinks) -> HalfStep[tuple[SampledToken, ...]]:
        num_layers, hidden_size = self._models[step.header.model]
        rows = np.ones((step.header.num_tokens, hidden_size), np.float32)
        for layer in range(num_layers):
            flag = epoch(step.header.step_seq, layer)
            for outlet in links.outlets.values():
                outlet.put(layer, flag, rows)
            yield Wait(tuple(links.inlets.values()), flag)
            for inlet in links.inlets.values():
                inlet.take(layer, *rows.shape)
        return tuple(SampledToken(row.sequence_id, 0) for row in step.rows)

    def forget(self, sequence_ids: Sequence[int]) -> None:
        """There is nothing to forget."""


class NullFFNWorker(_Models):
    """Gives every row straight back (`backends.base.FFNWorker`)."""

    def run(self, header: StepHeader, links: LaneLinks) -> HalfStep[None]:
        num_layers, hidden_size = self._models[header.model]
        (outlet,), (inlet,) = links.outlets.values(), links.inlets.values()
        for layer in range(num_layers):
            flag = epoch(header.step_seq, layer)
            yield Wait((inlet,), flag)
            outlet.put(layer, flag, inlet.take(layer, header.num_tokens, hidden_size))


def attention_worker(num_frames: int, frame_bytes: int) -> NullAttentionWorker:
    return NullAttentionWorker()


def ffn_worker(rank: str) -> NullFFNWorker:
    return NullFFNWorker()
