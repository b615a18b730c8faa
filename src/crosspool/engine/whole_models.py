"""Whether a prefill rank has room for one more model, asked before anything of it is loaded. Pure."""

from collections.abc import Iterable

from crosspool.engine.config import EngineConfig
from crosspool.engine.served_model import ServedModel
from crosspool.errors import CapacityError
from crosspool.models.whole_size import whole_bytes
from crosspool.units import format_bytes


def check_whole_model(model: ServedModel, others: Iterable[ServedModel], config: EngineConfig) -> None:
    """Raises CapacityError where the model, whole, is larger than the rank's room on its GPU, or than what `others`
    leave of the host's memory."""
    if not model.prefill_ranks:
        return
    size, room, host = whole_bytes(model.spec), config.prefill_pool_bytes, config.prefill_host_bytes
    if 0 < room < size:
        raise CapacityError(
            f"{model.name} takes {format_bytes(size)} whole and prefill_pool_bytes is {format_bytes(room)}; set at "
            f"least {format_bytes(size)}, or prefill inline"
        )
    held = {other.name: whole_bytes(other.spec) for other in others if other.prefill_ranks and other.name != model.name}
    if host is not None and sum(held.values()) + size > host:
        beside = f", beside {format_bytes(sum(held.values()))} of {', '.join(held)}" if held else ""
        raise CapacityError(
            f"{model.name} takes {format_bytes(size)} of host memory on each prefill rank{beside}, and each may use "
            f"{format_bytes(host)} of this machine's; unload a model, or serve with prefill inline"
        )
