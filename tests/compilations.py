"""What jax compiles while a test runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

BACKEND = "/jax/core/compile/backend_compile_duration"  # one a program


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Collects every trace, lowering and compilation inside the block, by the name of its event."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith("/jax/core/compile"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
