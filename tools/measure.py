"""What the benchmarks share: times, the rate of one large matrix product, compilations, peak memory."""

from __future__ import annotations

import dataclasses
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def timed(call: Callable[[], Any], runs: int) -> tuple[float, float]:
    """Median seconds of ``runs`` calls after a first one that compiles, and the seconds of that one."""
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]), times[0]


def matmul_peak(size: int = 2048, runs: int = 5) -> float:
    """GFLOP/s of one square product in float32 on this machine's default device."""
    a = jnp.ones((size, size))
    product = jax.jit(lambda x: x @ x)
    seconds, _ = timed(lambda: product(a).block_until_ready(), runs)
    return 2 * size**3 / seconds / 1e9


def peak_bytes() -> int:
    """The most memory used so far: on the first device where it tells, else by this process on the host."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("peak_bytes_in_use") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


@dataclasses.dataclass
class Compiled:
    """Programs compiled while it was listening, and the seconds that took."""

    count: int = 0
    seconds: float = 0.0

    def __enter__(self) -> Compiled:
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *error: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1
            self.seconds += duration_secs
