"""ReplicatedPages: the pages of one model whose GPUs hold weights and KV together, as monolithic engines keep them.

A replica is a set of GPUs that a sequence's cache is spread over evenly; a model whose KV heads do not divide over its
GPUs has several, and a sequence sees one of them only. GPUs may be shared with other models, whose pages come out of
the same budgets. Budgets decide by the engine's own rule (`engine/admission.py`).
"""

from collections.abc import Sequence as Items

from crosspool.engine.admission import PageBudget
from crosspool.engine.claims import Claim
from crosspool.engine.forecast import OutputEstimate
from crosspool.engine.kv_rank_pages import KVRankPages
from crosspool.engine.lengths import frames_for
from crosspool.engine.sequence import Sequence
from crosspool.engine.served_model import ServedModel
from crosspool.kv_pool.pool import Page

PLACEHOLDER: Page = ()
"""A page in a block table: which frames it has on which GPU is of no interest here."""


class ReplicatedPages(KVRankPages):
    """`model.frames_per_page` counts frames on each GPU of a replica. One of these for each model."""

    def __init__(self, model: ServedModel, replicas: Items[Items[PageBudget]], estimate: OutputEstimate) -> None:
        largest = max(min(budget.num_frames for budget in replica) for replica in replicas)
        super().__init__(model.kv_rank, max(2, largest + 1), model.frame_bytes, estimate)
        self.add_model(model)
        self._model = model
        self._replicas = replicas
        self._places: dict[int, Items[PageBudget]] = {}  # by sequence: the budgets of its replica's GPUs

    @property
    def num_held(self) -> int:
        """Frames of this model on the GPUs of one replica each."""
        return sum(budgets[0].claims[key].held for key, budgets in self._places.items())

    def admits(self, sequence: Sequence) -> bool:
        claim = self._claim(sequence)
        return any(all(budget.admits(claim) for budget in replica) for replica in self._replicas)

    def admit(self, sequence: Sequence) -> None:
        """Into the replica with most free memory of those that admit it."""
        claim = self._claim(sequence)
        fitting = [replica for replica in self._replicas if all(budget.admits(claim) for budget in replica)]
        best = max(fitting, key=lambda replica: min(budget.num_frames - budget.num_held for budget in replica))
        self._places[sequence.sequence_id] = best
        for budget in best:
            budget.open(sequence.sequence_id, self._claim(sequence))
        self._extend(sequence, sequence.num_tokens)

    def ensure_slot(self, sequence: Sequence) -> bool:
        num_tokens = sequence.num_cached_tokens + 1
        missing = sequence.table.num_missing(num_tokens)
        if missing == 0:
            return True
        key = sequence.sequence_id
        num_frames = missing * self._model.frames_per_page
        expected = frames_for(self._model, self._expected_tokens(sequence))
        grown: list[tuple[PageBudget, Claim]] = []
        for budget in self._places[key]:
            before = budget.claims[key]
            if not budget.grow(key, num_frames, expected):
                for other, claim in grown:  # all GPUs of the replica or none
                    other.claims[key] = claim
                self.stalled.add(key)
                return False
            grown.append((budget, before))
        self.stalled.discard(key)
        self._extend(sequence, num_tokens)
        return True

    def stop_growing(self, sequence: Sequence) -> None:
        for budget in self._places[sequence.sequence_id]:
            budget.stop_growing(sequence.sequence_id)

    def release(self, sequence: Sequence) -> None:
        sequence.table.clear()
        self.stalled.discard(sequence.sequence_id)
        for budget in self._places.pop(sequence.sequence_id, ()):
            budget.close(sequence.sequence_id)

    def frames_used(self, model: str) -> int:
        return self.num_held

    def frames_reserved(self, sequence_ids: list[int]) -> int:
        claims = (self._places[key][0].claims[key] for key in sequence_ids)
        return sum(claim.expected - claim.held for claim in claims)

    def _extend(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.table.extend((PLACEHOLDER,) * sequence.table.num_missing(num_tokens))
