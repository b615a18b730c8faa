"""Admitter: lets sequences that wait in their models' queues into the KV pool."""

from collections.abc import Sequence as Items

from crosspool.engine.config import EngineConfig
from crosspool.engine.model_loads import ModelLoad, ModelLoads
from crosspool.engine.queues import AdmissionOrder
from crosspool.engine.ranks import RankHealth
from crosspool.engine.sequence import Sequence, SequenceState


class Admitter:
    """Which waiting sequence comes in next, and to which home.

    is_due: a sequence has come, or something has changed that may let one in. Until it is set nobody is looked at.
    """

    def __init__(self, config: EngineConfig, models: ModelLoads, ranks: RankHealth) -> None:
        self.is_due = False
        self._max_num_seqs = config.max_num_seqs
        self._order = AdmissionOrder(ageing_s=config.ageing_s, bypass_window=config.bypass_window)
        self._loads, self._kv = models.by_name, models.kv
        self._ranks = ranks

    def admit(self, now: float) -> None:
        """Admit all that fit, if that is due."""
        if not self.is_due:
            return
        self.is_due = False
        for names in self._kv.groups:
            loads = [self._loads[name] for name in names]
            while self._admit_one(loads, now):
                pass
        self.is_due |= self._kv.has_stalled

    def _admit_one(self, loads: Items[ModelLoad], now: float) -> bool:
        """Admit the next sequence of models that have KV ranks in common, if one may come in now."""
        kv = self._kv
        homes = {
            load.model.name: [home for home in load.homes_up(self._ranks) if kv.is_open(load.model.name, home)]
            for load in loads
            if load.num_live < self._max_num_seqs
        }
        queues = [load.queue for load in loads if homes.get(load.model.name)]

        def fits(sequence: Sequence) -> bool:
            return kv.home_for(sequence, homes[sequence.request.model]) is not None

        sequence = self._order.pick(queues, now, kv.frames_used, fits, kv.is_capped, kv.is_floored)
        if sequence is None:
            return False
        load = self._loads[sequence.request.model]
        home = kv.home_for(sequence, homes[load.model.name])
        assert home is not None
        load.queue.take(sequence, now)
        kv.admit(sequence, home)
        load.enter(sequence, SequenceState.PREFILLING)
        return True
