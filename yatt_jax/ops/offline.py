"""Parts of the offline algorithms' protocol that most of them share."""

from __future__ import annotations

from typing import Any


def check(hyper: Any) -> list[str]:
    """Faults of the settings beyond those that ``Hyper`` itself finds: none."""
    del hyper
    return []


def unscored(hyper: Any) -> tuple[str, ...]:
    """Roles whose scores ``prepare`` needs: none."""
    del hyper
    return ()


def by_reference(hyper: Any) -> tuple[str, ...]:
    """Roles whose scores ``prepare`` needs: the frozen reference."""
    del hyper
    return ("reference",)


def trains_actor(hyper: Any, step: int) -> tuple[str, ...]:
    """Roles that are updated in a step: the policy."""
    del hyper, step
    return ("actor",)


def trains_reward(hyper: Any, step: int) -> tuple[str, ...]:
    """Roles that are updated in a step: the reward model."""
    del hyper, step
    return ("reward",)
