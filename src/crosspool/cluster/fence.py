"""A memory barrier from Python, for words that two processes share."""

import platform
import threading

STORES_ARE_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")
"""Whether this machine by itself keeps stores in order and loads in order (x86 does, ARM does not)."""


class Fence:
    """A barrier for one thread: give each thread, or each object that only one thread uses, its own.

    Releasing a lock and taking it again is a release store and then an acquiring atomic exchange: a full barrier on x86
    (a locked instruction) and on ARMv8 (which keeps a release before a later acquire). Costs about 0.1 us.
    """

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = threading.Lock()
        self._held.acquire()

    def full(self) -> None:
        """Order every memory access before the call before every access after it, a store before a load too."""
        self._held.release()
        self._held.acquire()

    def stores_or_loads(self) -> None:
        """Order stores after stores and loads after loads: nothing to do where the machine does it."""
        if not STORES_ARE_ORDERED:
            self.full()
