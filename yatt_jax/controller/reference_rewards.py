"""What the starting policy is rewarded with, so that rewards on any scale can be normalised by it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from yatt_jax.controller.hosts import Sums, totals
from yatt_jax.data.prompts import PromptSource
from yatt_jax.errors import RunFailure
from yatt_jax.rewards import Scale

if TYPE_CHECKING:
    from yatt_jax.controller.online_job import OnlineJob

# Reference samples draw from a seed of their own, as held-out ones do.
REFERENCE_SEED = 2 << 32


def fit_scales(job: OnlineJob) -> dict[str, Scale]:
    """Mean and standard deviation of each reward that asks for it, over responses of the current policy.

    Prompts are drawn from the training data, in an order of their own, so that the run's own order is not touched; the
    same numbers come out for any number of processes.

    Raises:
      RunFailure: a reward with fewer than two valid values, or with the same value everywhere.
    """
    config = job.config
    wanted = {name: spec.reference for name, spec in config.rewards.items() if spec.reference}
    if not wanted:
        return {}
    seed = config.seed + REFERENCE_SEED
    prompts = PromptSource(
        config.data,
        job.plan.tokenizer,
        prompts_per_step=max(wanted.values()),
        seed=seed,
        process_index=job.hosts.process,
        process_count=job.hosts.count,
    )
    draw = prompts.draw()
    _, samples = job.generate(draw.prompts, draw.numbers, draw.numbers, job.sampling, seed=seed, version=0)
    rewards = job.reward(samples).rewards
    sums: Sums = {}
    for name, count in wanted.items():
        values = np.asarray(rewards[name], np.float64)[np.array(draw.numbers, np.int64) < count]
        values = values[np.isfinite(values)]
        sums |= {f"{name}/valid": (len(values), None), f"{name}/mean": (float(values.sum()), len(values))}
        sums[f"{name}/squares"] = float((values**2).sum()), len(values)
    found = totals(job.hosts.gather("reference rewards", sums))
    return {name: _scale(name, wanted[name], found) for name in wanted}


def _scale(name: str, count: int, found: dict[str, float]) -> Scale:
    mean, valid = found[f"{name}/mean"], found[f"{name}/valid"]
    variance = found[f"{name}/squares"] - mean**2 if valid > 1 else 0.0
    if not variance > 1e-12 * max(mean**2, 1e-12):
        raise RunFailure(
            f"config.rewards.{name}.reference = {count}: {int(valid)} responses of the starting policy got a valid "
            f"reward, with a standard deviation of 0, which cannot be divided by; ask for more, or set it to 0"
        )
    return Scale(mean, math.sqrt(variance))
