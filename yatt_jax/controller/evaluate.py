"""Held-out evaluation: what the actor writes on prompts that it is never trained on."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from yatt_jax.controller.figures import score_sums, variance
from yatt_jax.controller.hosts import Sums, totals
from yatt_jax.controller.online_job import EVALUATION_SEED, OnlineJob
from yatt_jax.rewards import Scores
from yatt_jax.types import Sample


def evaluate(job: OnlineJob, step: int) -> None:
    """Samples the held-out prompts after ``step`` steps, if the configuration asks for it now.

    The same prompts, sample ids and seed are used each time, so that only the weights differ; every process samples its
    share. The mean reward is reported with the half-width of its 95 % confidence interval, every held-out row counted
    once.
    """
    if not job.evaluates(step) or not job.held_out_anywhere:
        return
    with job.phase("evaluate"):
        sampling = dataclasses.replace(job.sampling, temperature=job.config.evaluation.temperature)
        ids = [prompt.index for prompt in job.held_out]
        seed = job.config.seed + EVALUATION_SEED
        _, samples = job.generate(job.held_out, ids, ids, sampling, seed=seed, version=step)
        rewards = job.reward(samples)
        found = totals(job.hosts.gather("evaluation", _sums(samples, rewards)))
    records = job.samples.write(step, "eval", samples, rewards.total, rewards.rewards)
    count, spread = found.pop("valid"), variance(found)
    if count > 1:
        found["reward_ci95"] = 1.96 * math.sqrt(spread / (count - 1))
    job.record.add({f"eval/{name}": value for name, value in found.items()})
    if job.config.report.console_samples:
        job.console.samples(records[: job.config.report.console_samples], f"held out, after {step} steps")


def _sums(samples: list[Sample], rewards: Scores) -> Sums:
    """This process's figures, to be added over processes."""
    valid, n = int(np.sum(np.isfinite(rewards.total))), len(samples)
    return score_sums(rewards) | {
        "valid": (valid, None),
        "reward_invalid": (n - valid, n),
        "response_length": (sum(len(sample.tokens) for sample in samples), n),
        "ended": (sum(sample.finish in ("stop", "stop_string") for sample in samples), n),
    }
