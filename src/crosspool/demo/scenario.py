"""What the demo asks: which models, which prompts, when. Data, so that the flow in `run.py` stays short."""

from dataclasses import dataclass
from pathlib import Path

DEMO_MODELS = ("austen", "shakespeare", "holmes")


def demo_model_dirs() -> dict[str, Path]:
    """Name to directory of the three models inside the package."""
    root = Path(__file__).resolve().parent.parent / "demo_models"
    return {name: root / name for name in DEMO_MODELS}


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One streamed chat request. `shown`: its answer is printed, beside those of the other models.

    `delay_s` counts from the start of its burst of requests.
    """

    model: str
    prompt: str
    delay_s: float
    max_tokens: int
    shown: bool = False


_OPENINGS: dict[str, tuple[str, ...]] = {
    "austen": (
        "It was a fine morning, and the whole family were at breakfast.",
        "The letter came from her sister.",
        "Mr. Knightley had been walking in the garden.",
        "There was to be a ball at the house.",
    ),
    "shakespeare": (
        "Who comes here?",
        "My lord, the king is dead.",
        "What news from the battle?",
        "Speak, gentle lady, of thy love.",
    ),
    "holmes": (
        "Holmes, what do you make of this letter?",
        "There was a knock at the door of Baker Street.",
        "The man had vanished in the night.",
        "Have you read of the murder in the paper?",
    ),
}


def demo_requests() -> tuple[tuple[DemoRequest, ...], ...]:
    """Bursts of requests, one a model, each to begin as the one before it fades; the shown ones start with the first.

    Bursts of the models are apart in time, as cold models' are: that is what one shared pool makes use of. They follow
    one another rather than the clock, so that a slow machine shows the same picture.
    """
    shown = tuple(DemoRequest(model, _OPENINGS[model][0], 0.0, 160, shown=True) for model in DEMO_MODELS)
    bursts = [
        tuple(
            DemoRequest(model, opening, 0.2 * (wave + 1), 60 + 40 * wave)
            for wave in range(3)
            for opening in _OPENINGS[model][1:]
        )
        for model in DEMO_MODELS
    ]
    return (shown + bursts[0], *bursts[1:])
