"""The compiled programs of a job: scoring, preparing, updating."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.typing import ArrayLike

from yatt_jax.controller.online_plan import OnlinePlan
from yatt_jax.controller.optimizer import make_optimizer
from yatt_jax.controller.score import make_forward, make_score
from yatt_jax.controller.update import update
from yatt_jax.parallel.pack import Packed
from yatt_jax.types import Metrics, Params, PyTree, Rollout, TrainState

Update = Callable[[TrainState, Packed, ArrayLike], tuple[TrainState, Metrics]]


@dataclasses.dataclass(frozen=True)
class Programs:
    """Jitted functions; each compiles once: rows and packs have the same sizes in every step.

    Attributes:
      score: role -> ``(params, rollout, temperature) -> Logprobs | Values``; the rollout is packed.
      prepare: ``(rollout, rewards, scores, kl_coef) -> batch, metrics``.
      update: role -> ``(state, minibatch, temperature) -> state, metrics``; the state is donated, the minibatch packed.
      transforms: role -> optax transformation.
      schedules: role -> learning rate by optimizer step.
    """

    score: dict[str, Callable[[Params, Packed, ArrayLike], PyTree]]
    prepare: Callable[[Rollout, jax.Array, dict[str, PyTree], ArrayLike], tuple[PyTree, Metrics]]
    update: dict[str, Update]
    transforms: dict[str, Any]
    schedules: dict[str, Callable[[int], Any]]


def make_programs(plan: OnlinePlan) -> Programs:
    """Builds the programs of a run; nothing compiles before the first call."""
    config, algo, hyper = plan.config, plan.algo, plan.config.hyper
    forwards = {role: make_forward(model, vocab_chunk=config.train.vocab_chunk) for role, model in plan.models.items()}
    optimizers = {"actor": config.actor_optimizer, "critic": config.critic_optimizer}
    made = {role: make_optimizer(optimizers[role], plan.updates[role]) for role in algo.TRAINS}

    def prepare(
        rollout: Rollout, rewards: jax.Array, scores: dict[str, PyTree], kl_coef: ArrayLike
    ) -> tuple[PyTree, Metrics]:
        batch, metrics = algo.prepare(rollout, rewards, scores, hyper, kl_coef)
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, plan.train.rows), batch), metrics

    def make_update(role: str) -> Update:
        forward, loss = forwards[role], algo.LOSSES[role]

        def run(state: TrainState, packed: Packed, temperature: ArrayLike) -> tuple[TrainState, Metrics]:
            with plan.train.active():
                return update(
                    state,
                    packed,
                    forward=lambda params, micro: forward(params, micro, temperature),
                    loss=lambda outputs, rows: loss(outputs, rows, hyper),
                    tx=made[role][0],
                )

        return jax.jit(run, donate_argnums=0)

    return Programs(
        score={role: make_score(forwards[role], plan.train) for role in algo.scored_by(hyper)},
        prepare=jax.jit(prepare),
        update={role: make_update(role) for role in algo.TRAINS},
        transforms={role: tx for role, (tx, _) in made.items()},
        schedules={role: schedule for role, (_, schedule) in made.items()},
    )
