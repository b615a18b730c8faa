"""The weights pool's worker: runs the FFN half of every step on its slice of the intermediate dimension."""

from collections.abc import Iterable, Mapping

import numpy as np

from crosspool.backends.base import FloatArray, HalfStep, LaneLinks, Progress, Wait
from crosspool.backends.numpy.ffn import MoEFFN, build_ffn
from crosspool.backends.numpy.layer_router import choices_of
from crosspool.backends.numpy.matrices import each_released
from crosspool.cluster.base import ModelPlacement
from crosspool.models.directory import read_model_dir
from crosspool.models.spec import ModelSpec, MoEFFNSpec
from crosspool.scheduler.step import StepHeader, epoch, run_over
from crosspool.weights_pool.loader import load_ffn_weights


class FFNHalf:
    """Every layer's FFN of one model, cut to one slice. takes_choices: experts come with the rows (`route: kv`)."""

    def __init__(
        self, spec: ModelSpec, layers: Iterable[dict[str, FloatArray]], *, takes_choices: bool = False
    ) -> None:
        self.spec, self._takes_choices = spec, takes_choices
        self._layers = [build_ffn(layer.ffn, own) for layer, own in zip(spec.layers, layers, strict=True)]
        self.nbytes = sum(layer.nbytes for layer in self._layers)

    def width(self, layer: int) -> int:
        """Elements with which a token crosses to this layer."""
        ffn = self.spec.layers[layer].ffn
        return self.spec.hidden_size + (ffn.choices_width if self._takes_choices and isinstance(ffn, MoEFFNSpec) else 0)

    def __call__(self, layer: int, rows: FloatArray) -> FloatArray:
        """(num_tokens, hidden) partial sum of the layer's FFN, of rows (num_tokens, width)."""
        ffn, hidden = self._layers[layer], self.spec.hidden_size
        x = rows[:, :hidden]
        if self._takes_choices and isinstance(ffn, MoEFFN):
            choices = choices_of(rows, hidden, ffn.spec)
            return ffn(x[0], choices.of(0))[None] if len(x) == 1 else ffn(x, choices)
        return ffn(x[0])[None] if len(x) == 1 else ffn(x)


class NumpyFFNWorker:
    """Implements `backends.base.FFNWorker`. `rank` is this worker's name, which tells it its slice of each model."""

    def __init__(self, rank: str) -> None:
        self._rank = rank
        self._models: dict[str, FFNHalf] = {}

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None:
        if self._rank not in placement.weights_ranks:
            raise ValueError(f"{placement.name} is placed on {placement.weights_ranks}, not on rank {self._rank}")
        directory = read_model_dir(placement.directory)
        slice_index, num_slices = placement.weights_ranks.index(self._rank), len(placement.weights_ranks)
        weights = load_ffn_weights(
            directory, slice_index, num_slices, np.float32, progress, placement.weights_shares or None
        )
        self._models[placement.name] = FFNHalf(
            directory.spec, each_released(weights.layers), takes_choices=placement.route == "kv"
        )

    def run(self, header: StepHeader, links: LaneLinks) -> HalfStep[None]:
        model = self._models.get(header.model)
        if model is None:
            raise ValueError(f"model {header.model!r} is not on rank {self._rank}; it has {sorted(self._models)}")
        (inlet,), (outlet,) = links.inlets.values(), links.outlets.values()
        num_layers = model.spec.num_layers
        over = run_over(header.step_seq, header.num_steps, num_layers)
        for number in range(header.num_steps * num_layers):
            layer, flag = number % num_layers, epoch(header.step_seq, number)
            yield Wait((inlet,), flag)
            if layer == 0 < number and inlet.arrived(over):
                return  # the run has ended early
            rows = inlet.take(layer, header.num_tokens, model.width(layer))
            outlet.put(layer, flag, model(layer, rows))

    def remove_model(self, model: str) -> None:
        self._models.pop(model, None)

    def memory_bytes(self) -> Mapping[str, int]:
        # A copy first: another thread may be adding a model.
        return {"ffn_weights": sum(model.nbytes for model in list(self._models.values())), "kv_cache": 0}
