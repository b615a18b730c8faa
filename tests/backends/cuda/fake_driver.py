"""cuda-bindings' driver without a GPU: calls that tests name, each by a function of its arguments in their order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

SUCCESS = SimpleNamespace(name="CUDA_SUCCESS")


def put_in_place(monkeypatch: Any, calls: dict[str, Callable[..., tuple[Any, ...]]], **constants: Any) -> None:
    """calls: give what the driver gives behind its status, which is success. constants: of the driver's module."""
    fake = ModuleType("cuda.bindings.driver")
    fake.CUresult = SimpleNamespace(CUDA_SUCCESS=SUCCESS)

    def answering(found: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        return lambda *arguments: (SUCCESS, *found(*arguments))

    for name, found in calls.items():
        setattr(fake, name, answering(found))
    for name, value in constants.items():
        setattr(fake, name, value)
    bindings, cuda = ModuleType("cuda.bindings"), ModuleType("cuda")
    bindings.driver, cuda.bindings = fake, bindings
    for name, module in (("cuda", cuda), ("cuda.bindings", bindings), ("cuda.bindings.driver", fake)):
        monkeypatch.setitem(sys.modules, name, module)
