"""What a reward counts while it works: retries, malformed verdicts, programs that were stopped."""

from __future__ import annotations

import threading
from collections import Counter


class Counts:
    """Named sums, added to from any thread and taken once a step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Adds to a sum; adding 0 makes it appear."""
        with self._lock:
            self._sums[name] += count

    def take(self) -> dict[str, int]:
        """The sums since they were last taken; those of 0 stay, so that a metric does not come and go."""
        with self._lock:
            taken = dict(self._sums)
            self._sums = Counter(dict.fromkeys(taken, 0))
        return taken
