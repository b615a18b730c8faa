"""KVPages: the pages of all KV ranks, and on which of them a sequence's lie."""

from collections.abc import Iterable
from collections.abc import Sequence as Items

from crosspool.engine.config import EngineConfig
from crosspool.engine.forecast import OutputEstimate
from crosspool.engine.kv_rank_pages import KVRankPages
from crosspool.engine.limit_change import LimitChange
from crosspool.engine.prefix_pages import PrefixCounts, PrefixPages
from crosspool.engine.sequence import Sequence
from crosspool.engine.served_model import ServedModel
from crosspool.engine.split_pages import SplitPages, split_reach
from crosspool.engine.stats import RankFrames
from crosspool.kv_pool.host_tier import TierCounts
from crosspool.kv_pool.limits import PoolLimits

SequencePages = KVRankPages | SplitPages
"""What a sequence takes its pages from: one rank, or the ranks that share its model."""


class KVPages:
    """Routes what the core asks for a sequence to the ranks that it concerns.

    A sequence's `kv_rank` is the home of its steps: the model's, if that is split; else chosen at admission, the rank
    that has most of the sequence's prefix, and among equals the one with most free KV (CrossPool, arXiv 2606.24506).
    by_rank: of every KV rank that a model has been on; it stays the same object, and everyone who reads it holds it.
    """

    def __init__(self, config: EngineConfig, estimate: OutputEstimate) -> None:
        self.by_rank: dict[str, KVRankPages] = {}
        self._config, self._estimate = config, estimate
        self._models: dict[str, ServedModel] = {}
        self._split: dict[str, SplitPages] = {}
        self.groups: list[list[str]] = []  # models that have KV ranks in common, be it through others

    def add_model(self, model: ServedModel) -> None:
        """Serve a model on its ranks. Raises ValueError where its limits cannot be held."""
        self.limits(model)  # before any of them changes
        for rank in model.kv_ranks:
            if rank not in self.by_rank:
                self.by_rank[rank] = self._new_rank(rank)
        ranks = [self.by_rank[rank] for rank in model.kv_ranks]
        for pages in ranks:
            pages.add_model(model)
        self._models[model.name] = model
        if model.kv_split != "one":
            self._split[model.name] = SplitPages(model, ranks)
        self._group()

    def remove_model(self, name: str) -> None:
        for rank in self._models.pop(name).kv_ranks:
            self.by_rank[rank].remove_model(name)
        self._split.pop(name, None)
        self._group()

    def _group(self) -> None:
        groups: list[tuple[set[str], list[str]]] = []
        for name, model in self._models.items():
            ranks, names = set(model.kv_ranks), [name]
            for other in [group for group in groups if group[0] & ranks]:
                groups.remove(other)
                ranks, names = ranks | other[0], other[1] + names
            groups.append((ranks, names))
        self.groups = [names for _, names in groups]

    def of(self, sequence: Sequence) -> SequencePages:
        """Where an admitted sequence's pages come from."""
        return self._at(sequence.request.model, sequence.kv_rank)

    def is_open(self, model: str, home: str) -> bool:
        """Whether a new sequence may go there: nobody waits for a page of it."""
        split = self._split.get(model)
        return not self.by_rank[home].stalled if split is None else not split.is_stalled

    @property
    def has_stalled(self) -> bool:
        return any(pages.stalled for pages in self.by_rank.values())

    def home_for(self, sequence: Sequence, homes: Items[str]) -> str | None:
        """Which of the open `homes` the sequence is admitted to; None if none has room."""
        model = sequence.request.model
        fitting = [home for home in homes if self._at(model, home).admits(sequence)]
        if len(fitting) < 2:
            return fitting[0] if fitting else None
        return max(fitting, key=lambda home: (self._num_known(sequence, home), self.by_rank[home].room(model)))

    def admit(self, sequence: Sequence, home: str) -> None:
        """Claim what the sequence needs and give it the pages of all tokens it has."""
        sequence.kv_rank = home
        self.of(sequence).admit(sequence)

    def is_capped(self, sequence: Sequence) -> bool:
        """Whether its model's ceiling keeps it out wherever it could go."""
        return all(pages.is_capped(sequence) for pages in self._everywhere(sequence.request.model))

    def is_floored(self, sequence: Sequence) -> bool:
        """Whether what is kept for its model holds it somewhere."""
        return any(pages.is_floored(sequence) for pages in self._everywhere(sequence.request.model))

    def limits(self, model: ServedModel) -> list[PoolLimits]:
        """Of each of its ranks, once it is served too. Raises ValueError where they cannot be held."""
        ranks = [self.by_rank.get(rank) or self._new_rank(rank) for rank in model.kv_ranks]
        is_served = model.name in self._models
        return [pages.limits if is_served else pages.limits_with(model) for pages in ranks]

    def set_limits(self, change: LimitChange) -> None:
        """Change what models, all of them served, may hold, at once and as a whole.

        Raises ValueError, with the true numbers, for limits that cannot be held.
        """
        changed = {}
        for rank, pages in self.by_rank.items():
            here = {name for name, model in self._models.items() if rank in model.kv_ranks}
            changed[rank] = pages.changed_limits(change.of(here))
        for rank, limits in changed.items():
            self.by_rank[rank].set_limits(limits)

    def reach(self, model: ServedModel) -> int:
        """Frames by which the length of the model's sequences is, or would be, bound. Raises ValueError as `limits`."""
        frames = [limits.reach(model.name) for limits in self.limits(model)]
        if model.kv_split == "one":
            return max(frames)
        return split_reach(model, frames)

    def frames_by_rank(self, model: str, sequences: Iterable[Sequence]) -> dict[str, RankFrames]:
        """Frames on each of the model's ranks; `sequences` are its live ones."""
        live = list(sequences)
        found = {}
        for pages in self._ranks(model):
            is_here = model in self._split
            ids = [sequence.sequence_id for sequence in live if is_here or sequence.kv_rank == pages.kv_rank]
            found[pages.kv_rank] = RankFrames(
                used=pages.frames_used(model),
                reserved=pages.frames_reserved(ids),
                reusable=0 if pages.prefix is None else pages.prefix.frames_reusable(model),
            )
        return found

    def frames_used(self, model: str) -> int:
        """Frames in block tables of the model, on all its ranks."""
        return sum(pages.frames_used(model) for pages in self._ranks(model))

    def prefix(self, model: str, home: str) -> PrefixPages | None:
        """The prefix cache that sequences of the model with this home use."""
        return self._at(model, home).prefix

    def prefix_counts(self, model: str) -> PrefixCounts:
        """Of all its ranks together."""
        counts = [pages.prefix.counts[model] for pages in self._ranks(model) if pages.prefix is not None]
        return PrefixCounts(
            queries=sum(count.queries for count in counts),
            hits=sum(count.hits for count in counts),
            evictions=sum(count.evictions for count in counts),
        )

    def frames_stowed(self, model: str) -> int:
        """Host frames with pages of the model, on all its ranks."""
        return sum(pages.tier.num_frames(model) for pages in self._ranks(model) if pages.tier is not None)

    def tier_counts(self, model: str) -> TierCounts:
        """Of all its ranks together."""
        counts = [pages.tier.counts[model] for pages in self._ranks(model) if pages.tier is not None]
        return TierCounts(sum(each.stowed for each in counts), sum(each.brought_back for each in counts))

    def trim(self, model: str) -> int:
        """Forget its cached pages that nobody uses, stowed ones too, on all its ranks; the frames that are free now."""
        return sum(pages.prefix.drop_unused(model) for pages in self._ranks(model) if pages.prefix is not None)

    def _new_rank(self, kv_rank: str) -> KVRankPages:
        config = self._config
        number = config.kv_ranks.index(kv_rank) if kv_rank in config.kv_ranks else 0
        return KVRankPages(
            kv_rank,
            config.num_frames,
            config.frame_bytes,
            self._estimate,
            caches_prefixes=config.prefix_caching,
            maps_frames=config.kv_backing == "vmm",
            first_frame=number * config.num_frames,
            num_host_frames=config.num_host_frames,
        )

    def _ranks(self, model: str) -> list[KVRankPages]:
        return [self.by_rank[rank] for rank in self._models[model].kv_ranks]

    def _at(self, model: str, home: str) -> SequencePages:
        return self._split.get(model) or self.by_rank[home]

    def _everywhere(self, model: str) -> list[SequencePages]:
        split = self._split.get(model)
        return [*self._ranks(model)] if split is None else [split]

    def _num_known(self, sequence: Sequence, home: str) -> int:
        """Pages of the sequence's first tokens that the rank has, stowed ones included."""
        prefix = self.by_rank[home].prefix
        if prefix is None:
            return 0
        num_found = len(prefix.find(sequence))
        return num_found + prefix.num_stowed(sequence, num_found)
