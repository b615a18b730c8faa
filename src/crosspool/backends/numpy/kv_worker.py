"""The KV pool's worker: runs the attention half of every step, layer by layer, and samples at its end."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from crosspool.backends.base import FloatArray, HalfStep, LaneLinks, Progress, Wait
from crosspool.backends.numpy.attention_half import AttentionHalf
from crosspool.backends.numpy.attention_step import AttentionStep, Model
from crosspool.backends.numpy.handed_chunk import handed_chunk
from crosspool.backends.numpy.host_frames import HostFrames
from crosspool.backends.numpy.host_vmm import arena_at
from crosspool.backends.numpy.kv_cache import new_arena
from crosspool.backends.numpy.placed_model import Share, Site, placed_model
from crosspool.backends.numpy.step_rows import StepRows
from crosspool.backends.sequences.page_reader import PageReader
from crosspool.backends.sequences.sequence import Sequence
from crosspool.cluster.base import ModelPlacement
from crosspool.core import SampledToken
from crosspool.kv_pool.backing.mapped_frames import MappedFrames
from crosspool.kv_pool.geometry import page_geometry
from crosspool.models.directory import read_model_dir
from crosspool.models.spec import ModelSpec
from crosspool.scheduler.step import StepDescriptor, epoch, run_over


class NumpyAttentionWorker:
    """Implements `backends.base.AttentionWorker`. One arena for all models; the cache holds float32.

    Steps run in one thread; `add_model` may run in another, since a model appears only once it is complete.
    """

    def __init__(
        self,
        num_frames: int,
        frame_bytes: int,
        rank: str = "kv0",
        kv_ranks: SequenceOf[str] = ("kv0",),
        mapped: MappedFrames | None = None,
        num_host_frames: int = 0,
    ) -> None:
        """`rank` is this worker's name among `kv_ranks`, all of the deployment, which have as many frames each.

        mapped: the frames, where they are mapped for each model; without it they are one arena. num_host_frames: of
        host memory beside the arena, for pages that the pool gives up.
        """
        self._mapped = mapped
        self._arena = new_arena(num_frames if mapped is None else 2, frame_bytes)
        self.host_frames: HostFrames | None = None
        if num_host_frames:
            first_frame = tuple(kv_ranks).index(rank) * num_frames
            self.host_frames = HostFrames(self._arena, num_host_frames, first_frame)
        self._site = Site(rank, tuple(kv_ranks), self._arena)
        self._models: dict[str, Model] = {}
        self._shares: dict[str, Share] = {}
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
        if self._site.rank not in placement.kv_ranks:
            raise ValueError(f"{placement.name} is placed on {placement.kv_ranks}, not on rank {self._site.rank}")
        site = self._site_of(placement)
        try:
            model = placed_model(placement, site, progress)
        except BaseException:
            if self._mapped is not None:
                self._mapped.remove_model(placement.name)  # its range; the next load of that name takes one of its own
            raise
        if isinstance(model, Share):
            self._shares[placement.name] = model
        else:
            self._models[placement.name] = model

    def _site_of(self, placement: ModelPlacement) -> Site:
        """Where the model finds its frames: the arena of all models, or a range of its own."""
        if self._mapped is None:
            return self._site
        spec = read_model_dir(placement.directory).spec
        geometry = page_geometry(
            spec,
            page_tokens=placement.page_tokens,
            frame_bytes=placement.frame_bytes,
            kv_dtype="float32",
            model=placement.name,
        )
        return replace(self._site, arena=arena_at(self._mapped.add_model(placement.name, geometry.frames_per_page)))

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
        self._models[name] = Model(half, page_tokens, self._site.pages(name, geometry.frames_per_page))

    def begin(self, step: StepDescriptor, name: str) -> AttentionStep:
        """Take in joining sequences and set up a step of model `name`. Raises ValueError if it cannot run here."""
        model = self._models.get(name)
        if model is None:
            raise ValueError(f"model {name!r} is not on this KV rank; it has {sorted(self._models)}")
        self._join(step, name, model.half.spec, model.pages)
        return AttentionStep(model, step, self._sequences)

    def _join(self, step: StepDescriptor, name: str, spec: ModelSpec, pages: PageReader) -> None:
        for new in step.joining:
            sequence = Sequence(new, name, pages.frames_per_page, spec.vocab_size, pages)
            self._sequences[new.sequence_id] = sequence

    def run(self, step: StepDescriptor, links: LaneLinks) -> HalfStep[tuple[SampledToken, ...]]:
        return self._run(step, links) if self._mapped is None else self._run_mapped(step, links, self._mapped)

    def _run_mapped(
        self, step: StepDescriptor, links: LaneLinks, mapped: MappedFrames
    ) -> HalfStep[tuple[SampledToken, ...]]:
        """The step once every page that it brings has its spot; none of them moves before it has ended."""
        key = mapped.begin(step)
        try:
            return (yield from self._run(mapped.placed(step), links))
        finally:
            mapped.end(key)

    def _run(self, step: StepDescriptor, links: LaneLinks) -> HalfStep[tuple[SampledToken, ...]]:
        """The steps of a run, one after another; it ends early once all its sequences have ended."""
        if step.header.prefill_rank is not None:
            attention = self.begin(step, step.header.model)
            num_sampled = sum(row.sample for row in step.rows)
            return (yield from handed_chunk(attention, step.header, links, num_sampled))
        told: tuple[SampledToken, ...] = ()
        ended: set[int] = set()
        attention = self.begin(step, step.header.model)
        for idx in range(step.num_steps):
            if idx:
                attention.follow()
            sampled = yield from self._run_part(attention, step, idx, links, told)
            ended |= attention.ended
            if len(ended) == len(step.rows) and idx + 1 < step.num_steps:
                attention.end_run(step.num_steps - idx - 1)
                over = run_over(step.header.step_seq, step.num_steps, attention.half.spec.num_layers)
                for outlet in links.outlets.values():  # the weights ranks see that no rows come any more
                    outlet.put(0, over, attention.hidden)
                break
            told = sampled
        return sampled

    def _run_part(
        self,
        attention: AttentionStep,
        step: StepDescriptor,
        idx: int,
        links: LaneLinks,
        told: tuple[SampledToken, ...],
    ) -> HalfStep[tuple[SampledToken, ...]]:
        """Step `idx` of a run. told: the tokens of the one before it."""
        model = self._models[step.header.model]
        exchange, routers = model.exchange, model.routers
        split = None if exchange is None else exchange(attention, links)
        num_tokens, hidden_size = attention.hidden.shape
        outlets, inlets = tuple(links.outlets.values()), tuple(links.inlets.values())
        for layer in range(attention.half.spec.num_layers):
            flag = epoch(step.header.step_seq, idx * attention.half.spec.num_layers + layer)
            rows = attention.attend(layer) if split is None else (yield from split.attend(layer, flag))
            if routers is not None:
                rows = routers.joined(layer, rows)
            for outlet in outlets:
                outlet.put(layer, flag, rows)
            yield Wait(inlets, flag, (told,) if told and layer == 0 else ())
            attention.add(inlet.take(layer, num_tokens, hidden_size) for inlet in inlets)
        return attention.finish()

    def run_share(self, step: StepDescriptor, links: LaneLinks) -> HalfStep[None] | None:
        """The part of this rank in a step that another KV rank leads (`backends.base.ShareWorker`)."""
        name = step.header.model
        share = self._shares.get(name)
        if share is None:
            raise ValueError(f"this KV rank has no share of model {name!r}; it has {sorted(self._shares)}")
        self._join(step, name, share.part.spec, share.pages)
        rows = StepRows(step, self._sequences, share.page_tokens)
        (inlet,), (outlet,) = links.exchange_inlets.values(), links.exchange_outlets.values()
        answers = share.part.answers(rows, step.header, inlet, outlet)
        if answers is None:
            rows.commit({})
            return None
        return _answered(answers, rows)

    def forget(self, sequence_ids: SequenceOf[int]) -> None:
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)
        if self._mapped is not None:
            self._mapped.forget(sequence_ids)

    def remove_model(self, model: str) -> None:
        self._models.pop(model, None)
        self._shares.pop(model, None)
        if self._mapped is not None:
            self._mapped.remove_model(model)
        self._sequences = {key: sequence for key, sequence in self._sequences.items() if sequence.model != model}

    def memory_bytes(self) -> Mapping[str, int]:
        weights = sum(model.half.nbytes for model in list(self._models.values()))
        weights += sum(share.part.nbytes for share in list(self._shares.values()))
        kv_cache = self._arena.nbytes if self._mapped is None else self._mapped.num_bytes
        known = {"attention_weights": weights, "kv_cache": kv_cache, "ffn_weights": 0}
        return known if self.host_frames is None else known | {"host_kv_cache": self.host_frames.num_bytes}


def _answered(answers: HalfStep[None], rows: StepRows) -> HalfStep[None]:
    """The answers, and after the last of them what the step leaves behind."""
    yield from answers
    rows.commit({})
