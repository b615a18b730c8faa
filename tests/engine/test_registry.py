"""The registry: whose name is free, and when."""

from __future__ import annotations

import pytest

from crosspool.engine.registry import ModelRegistry, outcome
from tests.support.core_drive import a_model


def test_a_failed_models_name_is_free_but_not_while_somebody_waits_for_its_removal() -> None:
    """Else the entry that they wait for would be replaced, and nobody would tell them of its end."""
    registry, model = ModelRegistry(max_sequences=8), a_model("m")
    first = registry.add(model, 100, serving=False)
    registry.update("m", state="failed", error="cut short")
    first.removed = outcome()
    with pytest.raises(ValueError, match="model m is just being removed; add it again once it is gone"):
        registry.add(model, 100, serving=False)
    assert registry.get("m") is first
    first.removed = None
    assert registry.add(model, 100, serving=False).info.state == "loading"
