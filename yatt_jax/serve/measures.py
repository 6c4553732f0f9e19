"""What a server tells Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Measures:
    """Counters and histograms of one server."""

    def __init__(self) -> None:
        self._registry = own = CollectorRegistry()
        self.requests = Counter("yatt_requests", "Requests answered", ["path", "status"], registry=own)
        self.request_seconds = Histogram(
            "yatt_request_seconds", "From a request's head to its answer", ["path"], registry=own, buckets=_SECONDS
        )
        self.batch_seconds = Histogram("yatt_batch_seconds", "A call of the model", registry=own, buckets=_SECONDS)
        self.batch_rows = Histogram("yatt_batch_rows", "Texts of a call", registry=own, buckets=_ROWS)
        self.tokens = Counter("yatt_tokens", "Tokens computed, without padding", registry=own)
        self.padding = Counter("yatt_padding_tokens", "Padding computed", registry=own)
        self.waiting = Gauge("yatt_waiting_texts", "Texts that wait for a call", registry=own)

    def batch(self, rows: int, seconds: float) -> None:
        """Notes a call of the model."""
        self.batch_rows.observe(rows)
        self.batch_seconds.observe(seconds)

    def computed(self, tokens: int, padding: int) -> None:
        """Notes what a program computed."""
        self.tokens.inc(tokens)
        self.padding.inc(padding)

    def wait(self, count: Callable[[], int]) -> None:
        """Where the number of waiting texts is read."""
        self.waiting.set_function(count)

    def text(self) -> bytes:
        """All of them in Prometheus's format."""
        return generate_latest(self._registry)
