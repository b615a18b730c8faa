"""The exception tree: what callers need to tell apart.

`ValueError` stays the type for a value a user can fix in a call; these are for outcomes of the running system.
"""


class CrossPoolError(Exception):
    """Base of every error that CrossPool raises on purpose. Its message names values and the remedy."""


class UnsupportedModelError(CrossPoolError):
    """The model's configuration asks for something no family here implements."""


class CheckpointError(CrossPoolError):
    """A model directory is incomplete or does not match its configuration; nothing of it stays loaded."""


class CapacityError(CrossPoolError):
    """What is asked for can never fit the pools, whatever else runs; the message holds the true numbers."""


class QueueFullError(CrossPoolError):
    """A model's queue is at its bound; the caller may try again after `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WorkerLostError(CrossPoolError):
    """A worker died or hung and did not come back within the recovery bound."""


class ShuttingDownError(CrossPoolError):
    """The engine no longer takes requests."""


class ModelRemovedError(CrossPoolError):
    """The model is being removed, and the others go on."""


class UnknownModelError(CrossPoolError):
    """No model of that name is served, or it is not ready; the message lists the served names."""


class ContextLengthError(CapacityError):
    """Prompt and asked output exceed what one sequence of the model may hold; the message holds all three numbers."""


class DeadlineExceededError(CrossPoolError):
    """The request waited in its queue past its deadline and was dropped before any prefill."""


class StepError(CrossPoolError):
    """A worker raised in the middle of a step, or its tokens gave no text; only the requests concerned end with it."""


class ConstraintError(CrossPoolError):
    """The grammar an answer has to follow cannot go on: it grew too complex, or its last token breaks it."""


def unreadable_because(error: Exception) -> str:
    """Why a file could not be read, without its name, which the message around it has."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
