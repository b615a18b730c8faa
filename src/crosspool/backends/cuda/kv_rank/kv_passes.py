"""Chooses a KV rank's pass for a step, and makes it where it is new: rows, crossing and, with shares, their home."""

from typing import NamedTuple

from crosspool.backends.cuda.channels.link import Site
from crosspool.backends.cuda.channels.transport import AttentionCrossing
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.joined import JoinedCrossing, JoinedFFN
from crosspool.backends.cuda.kernels.attention import AttentionScratch
from crosspool.backends.cuda.kv_rank.attention_pass import Crossing
from crosspool.backends.cuda.kv_rank.exchange import TokenHome
from crosspool.backends.cuda.kv_rank.head_exchange import HeadHome
from crosspool.backends.cuda.kv_rank.kv_models import KVModel
from crosspool.backends.cuda.kv_rank.kv_pass import KVPass, KVRows
from crosspool.backends.cuda.kv_rank.kv_router import KVRouter
from crosspool.backends.cuda.steps.lane import Links, WorkerLane


class KVPassKind(NamedTuple):
    """Which pass of a model: rows, whether any of them is sampled, whether they belong to different sequences."""

    bucket: int
    samples: bool
    is_decode: bool

    @property
    def is_run(self) -> bool:
        """Whether runs consist of such passes."""
        return self.samples and self.is_decode

    def row_numbers(self, used: int) -> list[int]:
        """Which row of a step each row of the pass holds; those that are not in use repeat the first."""
        return [row if row < used else 0 for row in range(self.bucket)]


class KVWay(NamedTuple):
    """What a step runs on.

    links: to the weights ranks, the last `num_shares` of them to other KV ranks. joined: computes the FFN in their
    stead.
    """

    model_name: str
    model: KVModel
    lane_number: int
    lane: WorkerLane
    links: Links
    num_shares: int = 0
    joined: JoinedFFN | None = None

    @property
    def num_weights_ranks(self) -> int:
        return len(self.links) - self.num_shares


class KVPasses:
    """The passes of one KV rank's models; each lane keeps its own."""

    def __init__(self, site: Site, kernels: Launcher, *, is_host_driven: bool) -> None:
        self._site, self._kernels = site, kernels
        # emulated kernels run in turn, and the host sees flags alone
        self._has_words = site.device.type == "cuda" and not is_host_driven
        self._scratch: dict[int, AttentionScratch] = {}  # of lanes, the largest so far

    def find(self, way: KVWay, kind: KVPassKind) -> KVPass:
        """The pass of this kind on this way, captured where there is a GPU."""
        source = way.lane.find_pass(way.model_name, way.links, kind, lambda: self._make(way, kind))
        assert isinstance(source, KVPass)
        return source

    def _make(self, way: KVWay, kind: KVPassKind) -> KVPass:
        rows = self._rows(way, kind.bucket)
        return KVPass(
            self._kernels,
            way.lane.memory,
            rows,
            self._crossing(way, kind.bucket),
            samples=kind.samples,
            is_decode=kind.is_decode,
            home=self._home(way, rows),
        )

    def _rows(self, way: KVWay, bucket: int) -> KVRows:
        model = way.model
        rows = model.rows.get((way.lane_number, bucket))
        if rows is None:
            rows = model.rows[way.lane_number, bucket] = KVRows(
                self._kernels,
                model.spec,
                model.weights,
                model.frames,
                model.geometry,
                bucket,
                model.max_pages,
                model.own_number,
                self._scratch.get(way.lane_number),
            )
            self._scratch[way.lane_number] = rows.half.scratch
        return rows

    def _crossing(self, way: KVWay, bucket: int) -> Crossing:
        model, memory = way.model, way.lane.memory
        if way.joined is not None:
            ffn, hidden = way.joined.half_of(way.model_name, way.lane_number), model.spec.hidden_size
            return JoinedCrossing(self._kernels, ffn, bucket, hidden, self._site.device)
        maps = [link.map() for link in way.links[: way.num_weights_ranks]]
        router = None
        if model.routers is not None:
            router = KVRouter.allocate(self._kernels, memory, model.spec, model.routers, bucket)
        return AttentionCrossing(self._kernels, memory, maps, takes_words=self._has_words, router=router)

    def _home(self, way: KVWay, rows: KVRows) -> TokenHome | HeadHome | None:
        half, memory, first_peer = rows.half, way.lane.memory, way.num_weights_ranks
        shares = [link.map() for link in way.links[first_peer:]]
        if rows.own is None:
            if not shares:
                return None
            tokens, hidden = half.normed.shape
            return HeadHome(self._kernels, memory, shares, first_peer, tokens, hidden, half.normed.device)
        return TokenHome(self._kernels, memory, rows.own, half.cache, shares, first_peer, len(half.token_ids))
