"""Held-out evaluation: what the actor writes on prompts that it is never trained on."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from yatt_jax.controller.job import EVALUATION_SEED, Job


def evaluate(job: Job, step: int) -> None:
    """Samples the held-out prompts after ``step`` steps, if the configuration asks for it now.

    The same prompts, sample ids and seed are used each time, so that only the weights differ. The mean reward is
    reported with the half-width of its 95 % confidence interval, every held-out row counted once.
    """
    settings, last = job.config.evaluation, job.config.steps
    due = settings.every and (step % settings.every == 0 or step in (0, last))
    if not due or not job.held_out:
        return
    with job.phase("evaluate"):
        sampling = dataclasses.replace(job.sampling, temperature=settings.temperature)
        ids = list(range(len(job.held_out)))
        seed = job.config.seed + EVALUATION_SEED
        _, samples = job.generate(job.held_out, ids, ids, sampling, seed=seed, version=step)
        rewards = job.reward(samples)
    records = job.samples.write(step, "eval", samples, rewards.total, rewards.rewards)
    valid = np.asarray(rewards.total, np.float64)
    valid = valid[np.isfinite(valid)]
    lengths = [len(sample.tokens) for sample in samples]
    metrics = {
        "eval/reward": float(valid.mean()) if len(valid) else math.nan,
        "eval/reward_ci95": 1.96 * float(valid.std(ddof=1)) / math.sqrt(len(valid)) if len(valid) > 1 else math.nan,
        "eval/reward_invalid": 1 - len(valid) / len(samples),
        "eval/response_length": float(np.mean(lengths)),
        "eval/ended": float(np.mean([sample.finish in ("stop", "stop_string") for sample in samples])),
    }
    metrics |= {f"eval/reward/{name}": float(np.nanmean(values)) for name, values in rewards.rewards.items()}
    job.add_metrics(metrics)
    if job.config.report.console_samples:
        job.console.samples(records[: job.config.report.console_samples], f"held out, after {step} steps")
