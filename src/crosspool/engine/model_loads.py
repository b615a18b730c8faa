"""ModelLoads: the models that are served, the pages of their KV ranks, and how long their sequences may become."""

from crosspool.engine.config import EngineConfig
from crosspool.engine.forecast import OutputEstimate
from crosspool.engine.kv_pages import KVPages
from crosspool.engine.lengths import context_limit
from crosspool.engine.limit_change import LimitChange
from crosspool.engine.model_load import ModelLoad
from crosspool.engine.pages import KVRankPages
from crosspool.engine.queues import ModelQueue
from crosspool.engine.served_model import ServedModel
from crosspool.errors import CapacityError, UnknownModelError


class ModelLoads:
    """Models by name and pages by KV rank. Both dicts stay the same objects: everyone who reads them holds them."""

    def __init__(self, config: EngineConfig, estimate: OutputEstimate) -> None:
        self.by_name: dict[str, ModelLoad] = {}
        self.pages: dict[str, KVRankPages] = {}
        self.kv = KVPages(self.pages)
        self._config = config
        self._estimate = estimate

    def of(self, name: str) -> ModelLoad:
        """Raises UnknownModelError."""
        if name not in self.by_name:
            served = ", ".join(self.by_name) or "none"
            raise UnknownModelError(f"no model {name!r} is served; served models: {served}")
        return self.by_name[name]

    def context_limit(self, model: ServedModel) -> int:
        """Prompt plus output tokens a request to `model` may ask for. Raises CapacityError if not one page fits."""
        context_limit(model, self._config.num_frames - 1)  # a page larger than the pool says so first
        reach = {}
        for kv_rank in model.kv_ranks:
            pages = self.pages.get(kv_rank) or self._new_pages(kv_rank)
            try:
                limits = pages.limits if model.name in self.by_name else pages.limits_with(model)
            except ValueError as error:
                raise CapacityError(str(error)) from None
            reach[kv_rank] = limits.reach(model.name)
        return context_limit(model, self.kv.reach(model, reach))

    def reach(self, model: ServedModel) -> int:
        """Frames by which the length of a served model's sequences is bound."""
        return self.kv.reach(model, {rank: self.pages[rank].limits.reach(model.name) for rank in model.kv_ranks})

    def set_limits(self, change: LimitChange) -> None:
        """Change what models may hold in the KV pool, at once and as a whole.

        Raises UnknownModelError, and ValueError with the true numbers for limits that cannot be held.
        """
        for name in change.models:
            self.of(name)
        changed = {}
        for kv_rank, pages in self.pages.items():
            here = {name for name, load in self.by_name.items() if kv_rank in load.model.kv_ranks}
            changed[kv_rank] = pages.changed_limits(change.of(here))
        for kv_rank, limits in changed.items():
            self.pages[kv_rank].set_limits(limits)

    def add(self, model: ServedModel) -> None:
        """Serve a model whose ranks have loaded it.

        Raises ValueError for a second one of that name, CapacityError if the pool cannot hold a page of it.
        """
        if model.name in self.by_name:
            raise ValueError(f"model {model.name} is already served; remove it first or give another name")
        self.context_limit(model)
        for kv_rank in model.kv_ranks:
            if kv_rank not in self.pages:
                self.pages[kv_rank] = self._new_pages(kv_rank)
        self.kv.add_model(model)
        queue = ModelQueue(model.name, self._config.max_queue, self._config.max_queue_per_key)
        self.by_name[model.name] = ModelLoad(model, queue)

    def remove(self, name: str) -> None:
        """Forget an idle model."""
        load = self.of(name)
        assert load.is_idle, f"model {name} still has sequences; drain or end it first"
        self.kv.remove_model(name)
        del self.by_name[name]

    def _new_pages(self, kv_rank: str) -> KVRankPages:
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
