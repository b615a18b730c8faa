"""The KV pool's worker: runs the attention half of every step, layer by layer, and samples at its end."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np

from crosspool.backends.base import FloatArray, HalfStep, LaneLinks, Progress, Wait
from crosspool.backends.numpy.attention_half import AttentionHalf
from crosspool.backends.numpy.attention_step import AttentionStep, Model
from crosspool.backends.numpy.kv_cache import new_arena
from crosspool.backends.numpy.matrices import each_released
from crosspool.backends.numpy.sequences import Sequence
from crosspool.cluster.base import ModelPlacement
from crosspool.core import SampledToken
from crosspool.kv_pool.geometry import page_geometry
from crosspool.models.directory import read_model_dir
from crosspool.models.spec import ModelSpec
from crosspool.scheduler.step import StepDescriptor, epoch
from crosspool.weights_pool.loader import load_attention_weights


class NumpyAttentionWorker:
    """Implements `backends.base.AttentionWorker`. One arena for all models; the cache holds float32.

    Steps run in one thread; `add_model` may run in another, since a model appears only once it is complete.
    """

    def __init__(self, num_frames: int, frame_bytes: int) -> None:
        self._arena = new_arena(num_frames, frame_bytes)
        self._models: dict[str, Model] = {}
        self._sequences: dict[int, Sequence] = {}

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None:
        if placement.kv_dtype != "float32":
            raise ValueError(f"kv_dtype is {placement.kv_dtype} for {placement.name}; the NumPy backend holds float32")
        frame_bytes = self._arena.shape[1]
        if placement.frame_bytes != frame_bytes:
            raise ValueError(
                f"{placement.name} is placed with frames of {placement.frame_bytes} bytes, this KV rank has frames of "
                f"{frame_bytes}; use one frame_bytes for all"
            )
        directory = read_model_dir(placement.directory)
        weights = load_attention_weights(directory, np.float32, progress)
        layers = each_released(weights.layers)
        self.add_weights(placement.name, directory.spec, weights.model, layers, placement.page_tokens)

    def add_weights(
        self,
        name: str,
        spec: ModelSpec,
        tensors: dict[str, FloatArray],
        layers: Iterable[dict[str, FloatArray]],
        page_tokens: int,
    ) -> None:
        """The same with weights that are in memory already: the model's own tensors, and those of each layer."""
        frame_bytes = self._arena.shape[1]
        geometry = page_geometry(spec, page_tokens=page_tokens, frame_bytes=frame_bytes, kv_dtype="float32", model=name)
        half = AttentionHalf(spec, tensors, layers, self._arena, geometry)
        self._models[name] = Model(half, page_tokens, geometry.frames_per_page)

    def begin(self, step: StepDescriptor, name: str) -> AttentionStep:
        """Take in joining sequences and set up a step of model `name`. Raises ValueError if it cannot run here."""
        model = self._models.get(name)
        if model is None:
            raise ValueError(f"model {name!r} is not on this KV rank; it has {sorted(self._models)}")
        for new in step.joining:
            vocab_size = model.half.spec.vocab_size
            self._sequences[new.sequence_id] = Sequence(new, name, model.frames_per_page, vocab_size)
        return AttentionStep(model, step, self._sequences)

    def run(self, step: StepDescriptor, links: LaneLinks) -> HalfStep[tuple[SampledToken, ...]]:
        attention = self.begin(step, step.header.model)
        num_tokens, hidden_size = attention.hidden.shape
        outlets, inlets = tuple(links.outlets.values()), tuple(links.inlets.values())
        for layer in range(attention.half.spec.num_layers):
            flag = epoch(step.header.step_seq, layer)
            rows = attention.attend(layer)
            for outlet in outlets:
                outlet.put(layer, flag, rows)
            yield Wait(inlets, flag)
            attention.add(inlet.take(layer, num_tokens, hidden_size) for inlet in inlets)
        return attention.finish()

    def forget(self, sequence_ids: SequenceOf[int]) -> None:
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)

    def remove_model(self, model: str) -> None:
        self._models.pop(model, None)
        self._sequences = {key: sequence for key, sequence in self._sequences.items() if sequence.model != model}

    def memory_bytes(self) -> Mapping[str, int]:
        weights = sum(model.half.nbytes for model in list(self._models.values()))
        return {"attention_weights": weights, "kv_cache": self._arena.nbytes, "ffn_weights": 0}
