"""Optimizers and learning-rate schedules, from optax parts."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import optax

from yatt_jax.ops.options import CountOrZero, NotNegative, Positive, Share, check
from yatt_jax.types import Params, PyTree

_NOT_DECAYED = ("scale", "bias")  # what norm weights and biases are called in every model


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer and its schedule. Every horizon counts optimizer steps, not batches or rollouts."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: NotNegative = 1e-6  # the highest learning rate
    schedule: Literal["constant", "linear", "cosine"] = "linear"  # after warm-up, down to lr * min_lr_ratio
    warmup_steps: CountOrZero = 0  # the first step has lr / warmup_steps
    min_lr_ratio: Share = 0.0
    b1: Share = 0.9  # sgd: momentum
    b2: Share = 0.95
    eps: Positive = 1e-5
    weight_decay: NotNegative = 0.0  # decoupled from the gradient; not on norms and biases
    clip_norm: NotNegative = 1.0  # limit of the gradient's global norm; 0: off

    def __post_init__(self) -> None:
        check(
            self,
            (self.name == "adamw" or not self.weight_decay, f"weight_decay = {self.weight_decay} needs name = 'adamw'"),
            (self.b1 != 1 and self.b2 != 1, f"b1 = {self.b1} and b2 = {self.b2} must be below 1"),
        )


def make_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """The learning rate as a function of the optimizer steps taken before.

    Args:
      config: its settings.
      total_steps: optimizer steps of the run; after them the rate stays at its lowest.

    Raises:
      ValueError: a warm-up that does not fit into the run.
    """
    warmup, peak, floor = config.warmup_steps, config.lr, config.lr * config.min_lr_ratio
    if warmup and warmup >= total_steps:
        raise ValueError(f"warmup_steps = {warmup}: the run has {total_steps} optimizer steps; it must be smaller")
    rest = max(1, total_steps - warmup)
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, floor, rest)
    else:
        after = optax.cosine_decay_schedule(peak, rest, alpha=config.min_lr_ratio)
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, warmup - 1), after], [warmup])


def make_optimizer(config: OptimizerConfig, total_steps: int) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Builds the gradient transformation: clipping, moments, weight decay, learning rate.

    Args:
      config: its settings.
      total_steps: optimizer steps of the run.

    Returns:
      The transformation and its schedule; ``schedule(state.step)`` is the rate of the next step.

    Raises:
      ValueError: a warm-up that does not fit into the run.
    """
    schedule = make_schedule(config, total_steps)
    parts = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    if config.name == "sgd":
        parts += [optax.trace(config.b1)] if config.b1 else []
    else:
        parts.append(optax.scale_by_adam(config.b1, config.b2, config.eps))
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=decayed))
    return optax.chain(*parts, optax.scale_by_learning_rate(schedule)), schedule


def decayed(params: Params) -> PyTree:
    """True for every parameter that weight decay applies to: matrices and tables, not norms and biases.

    Layers are stacked, so that a norm's weight has two dimensions like a matrix: the name decides.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in _NOT_DECAYED, params)
