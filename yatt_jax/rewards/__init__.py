"""Rewards: functions named by import path, reward models, and the scorer that runs and mixes them.

A reward is any function ``reward(samples: list[Sample], **kwargs)`` that returns a number for each sample, in order;
None, NaN or ``Invalid(reason)`` says that a sample cannot be judged.
"""

from yatt_jax.rewards.scorer import RewardError, Scale, Scorer, Scores, Scoring, build
from yatt_jax.rewards.spec import Invalid, ModelReward, RewardFn, RewardSpec

__all__ = [
    "Invalid",
    "ModelReward",
    "RewardError",
    "RewardFn",
    "RewardSpec",
    "Scale",
    "Scorer",
    "Scores",
    "Scoring",
    "build",
]
