"""Workloads of ``tools.simulate_placement``: what the rows of each step are like."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from tools.placement_world import Batch, Machine

Curve = Callable[[int], float]


@dataclasses.dataclass(frozen=True)
class Workload:
    """What steps are like.

    Attributes:
      name: of the workload.
      steps: number of steps.
      length: median tokens of responses at a step.
      verdict: median tokens of verdicts at a step.
      latency: median seconds of functions and servers at a step.
      rejected: share of rows whose group has no signal, so that others are sampled in their place.
      waves: most times that a place is sampled.
      pace: of a host; 1 is usual.
      drifts: whether what is best changes on the way.
      measured: lengths of the responses of each step, in the place of ``length``.
    """

    name: str
    steps: int
    length: Curve
    verdict: Curve
    latency: Curve = lambda step: 0.2
    rejected: float = 0.0
    waves: int = 4
    pace: Mapping[int, float] = dataclasses.field(default_factory=dict)
    drifts: bool = False
    measured: Sequence[Sequence[int]] = ()

    def batch(self, machine: Machine, step: int, host: int, seed: int) -> Batch:
        """A host's rows of a step: the same in every mode."""
        draw = np.random.default_rng((seed, step, host))
        first = machine.rows * machine.devices
        counts = [first]
        while self.rejected and len(counts) < self.waves:
            counts.append(round(counts[-1] * self.rejected))
        total = sum(counts)
        again, end = np.full(total, -1), 0
        for count, more in itertools.pairwise(counts):
            again[end + draw.permutation(count)[:more]] = end + count + np.arange(more)
            end += count

        def tokens(median: float, spread: float) -> np.ndarray:
            return np.clip(np.round(median * draw.lognormal(0, spread, total)), 1, machine.longest).astype(int)

        if self.measured:
            lengths = draw.choice(np.asarray(self.measured[step]), total).clip(1, machine.longest)
        else:
            lengths = tokens(self.length(step), 0.5)
        return Batch(
            prompts=np.full(total, machine.prompt),
            lengths=lengths,
            verdicts=tokens(self.verdict(step), 0.3),
            latency=self.latency(step) * draw.lognormal(0, 0.5, total),
            again=again,
            first=first,
            pace=self.pace.get(host, 1.0),
        )


def workloads(steps: int) -> dict[str, Workload]:
    """The synthetic workloads by name."""

    def flat(value: float) -> Curve:
        return lambda step: value

    def ramp(low: float, high: float, first: float = 0.0, last: float = 1.0) -> Curve:
        """Geometric from low to high between two shares of the run, constant before and after."""

        def at(step: int) -> float:
            part = min(max((step / max(1, steps - 1) - first) / (last - first), 0.0), 1.0)
            return low * (high / low) ** part

        return at

    def spike(step: int) -> float:
        return 20.0 if step % 12 in (5, 6) else 0.2

    made = [
        Workload("stationary", steps, flat(1024), flat(512)),
        Workload("dynamic sampling", steps, flat(1024), flat(512), rejected=0.4),
        Workload("lengths", steps, ramp(256, 4096), flat(1024), drifts=True),
        Workload("judge", steps, flat(1024), ramp(64, 4096), drifts=True),
        Workload("lengths, then judge", steps, ramp(256, 4096, 0, 0.5), ramp(64, 4096, 0.5, 1), drifts=True),
        Workload("reward latency spikes", steps, flat(1024), flat(512), latency=spike),
        Workload("slow host", steps, ramp(256, 4096), flat(1024), pace={0: 1.6}, drifts=True),
    ]
    return {workload.name: workload for workload in made}


def measured_workload(run: Path, verdict: float) -> Workload:
    """The lengths that a run's responses had, step by step.

    Args:
      run: run directory; its ``samples*.jsonl`` are read.
      verdict: median tokens of verdicts, which such a run does not have.

    Raises:
      ValueError: no training samples there.
    """
    lengths: dict[int, list[int]] = {}
    for file in sorted(run.glob("samples*.jsonl")):
        for line in file.read_text("utf-8").splitlines():
            record = json.loads(line)
            if record["split"] == "train":
                lengths.setdefault(record["step"], []).append(int(record["length"]))
    if not lengths:
        raise ValueError(f"{run}: no training samples in samples*.jsonl; name the directory of a run that sampled")
    steps = [lengths[step] for step in sorted(lengths)]
    return Workload(run.name, len(steps), lambda step: 0.0, lambda step: verdict, measured=steps)
