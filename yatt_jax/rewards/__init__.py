"""Rewards: functions named by import path, reward models, and the scorer that runs and mixes them.

A reward is any function ``reward(samples: list[Sample], **kwargs)`` that returns a number for each sample, in order;
None, NaN or ``Invalid(reason)`` says that a sample cannot be judged, ``Failed(reason)`` that judging it failed. For one
that holds connections or processes stands a frozen dataclass of settings whose ``open()`` returns the function.
"""

from yatt_jax.rewards.scorer import RewardError, Scale, Scorer, Scores, Scoring, build
from yatt_jax.rewards.spec import Failed, Invalid, ModelReward, RewardFn, RewardSpec

__all__ = [
    "Failed",
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
