"""Thread-safe sums that executors add to and the trainer takes once a step."""

from __future__ import annotations

import threading
from collections import defaultdict


class Counters:
    """Named float sums since the last `take`, shared by all executors of a run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = defaultdict(float)

    def add(self, **amounts: float) -> None:
        """Adds to several sums at once."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] += amount

    def take(self) -> dict[str, float]:
        """Returns all sums and starts again from zero; a name that nobody added to is 0 in the returned mapping."""
        with self._lock:
            sums, self._sums = self._sums, defaultdict(float)
        return sums
