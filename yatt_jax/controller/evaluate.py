"""Held-out evaluation: what the actor writes on prompts that it is never trained on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from yatt_jax.controller.figures import prompt_figures, prompt_sums, score_sums, with_intervals
from yatt_jax.controller.hosts import Sums, totals
from yatt_jax.controller.online_job import EVALUATION_SEED, OnlineJob
from yatt_jax.ops.estimates import attempts, majority, pass_at, win_share
from yatt_jax.rewards import Scores
from yatt_jax.types import Sample

_ROUNDING = 1e-6  # rewards are float32, and sums of several


def evaluate(job: OnlineJob, step: int) -> None:
    """Samples the held-out prompts after ``step`` steps, if the configuration asks for it now.

    The same prompts, sample ids and seed are used each time, so that only the weights differ; every process samples its
    share. Figures of prompts (mean reward of the responses, pass@k, maj@k, win rate) are reported with the half-width
    of their 95 % confidence interval, every held-out prompt counted once.
    """
    if not job.evaluates(step) or not job.held_out_anywhere:
        return
    with job.phase("evaluate"):
        if job.config.evaluation.win_rate and job.opponent is None:
            job.opponent = _sampled(job, step, "reference")[1].total
        samples, rewards = _sampled(job, step, "actor")
        sums = _sums(samples, rewards) | prompt_sums(_of_prompts(job, samples, rewards.total))
        found = with_intervals(totals(job.hosts.gather("evaluation", sums)))
    records = job.samples.write(step, "eval", samples, rewards.total, rewards.rewards)
    job.record.add({f"eval/{name}": value for name, value in found.items()})
    if job.config.report.console_samples:
        job.console.samples(records[: job.config.report.console_samples], f"held out, after {step} steps")


def _sampled(job: OnlineJob, step: int, role: str) -> tuple[list[Sample], Scores]:
    """What a role answers to this process's held-out prompts, ``evaluation.samples`` times to each in turn."""
    each, seed = job.config.evaluation.samples, job.config.seed + EVALUATION_SEED
    sampling = dataclasses.replace(job.sampling, temperature=job.config.evaluation.temperature)
    prompts = [prompt for prompt in job.held_out for _ in range(each)]
    ids = [prompt.index * each + i for prompt in job.held_out for i in range(each)]
    groups = [prompt.index for prompt in prompts]
    _, samples = job.generate(prompts, ids, groups, sampling, seed=seed, version=step, role=role)
    return samples, job.reward(samples)


def _sums(samples: Sequence[Sample], rewards: Scores) -> Sums:
    """This process's figures of single samples, to be added over processes."""
    valid, n = int(np.sum(np.isfinite(rewards.total))), len(samples)
    single = {name: sums for name, sums in score_sums(rewards).items() if name.startswith("reward/")}
    return single | {
        "reward_invalid": (n - valid, n),
        "response_length": (sum(len(sample.tokens) for sample in samples), n),
        "ended": (sum(sample.finish in ("stop", "stop_string") for sample in samples), n),
    }


def _of_prompts(job: OnlineJob, samples: list[Sample], total: Float[np.ndarray, "B"]) -> dict[str, list[float]]:
    """Figures of each of this process's prompts, NaN where there is none; invalid samples do not count."""
    config = job.config.evaluation
    names = prompt_figures(config.samples, bool(config.vote), config.win_rate)
    found: dict[str, list[float]] = {name: [] for name in names}
    answers = job.vote(samples) if job.vote else [None] * len(samples)
    for first in range(0, len(samples), config.samples):
        own = slice(first, first + config.samples)
        valid = np.isfinite(total[own])
        scores = total[own][valid]
        right = scores >= config.right_from - _ROUNDING
        count, solved = len(scores), int(right.sum())
        values = {"reward": float(scores.mean()) if count else math.nan}
        for k in attempts(config.samples):
            values[f"pass@{k}"] = pass_at(count, solved, k) if k <= count else math.nan
        if job.vote:
            voted = [answer for answer, good in zip(answers[own], valid, strict=True) if good]
            values[f"maj@{config.samples}"] = majority(voted, right.astype(float).tolist()) if count else math.nan
        if job.opponent is not None:
            values["win_rate"] = win_share(total[own], job.opponent[own])
        for name in names:
            found[name].append(values[name])
    return found
