"""The compiled programs of a run on given rows: scoring, preparing, updating, measuring."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from yatt_jax.controller.offline_plan import OfflinePlan
from yatt_jax.controller.optimizer import make_optimizer
from yatt_jax.controller.update import Forward, split_micro, update
from yatt_jax.data.collate import collate
from yatt_jax.models.build import Model
from yatt_jax.ops.chunks import Readout
from yatt_jax.ops.logprobs import logprobs_from_hidden
from yatt_jax.parallel.partition import constrain
from yatt_jax.types import Metrics, Params, PyTree, Ratio, TokenScores, TrainState


@dataclasses.dataclass(frozen=True)
class OfflinePrograms:
    """Jitted functions; each compiles once for each shape of a batch.

    Attributes:
      score: role -> ``(params, rows) -> scores``, or what the algorithm's ``summary`` makes of them.
      prepare: ``(rows, scores) -> batch, metrics``.
      update: role -> ``(state, batch) -> state, metrics``; the state is donated.
      measure: ``(params, batch) -> metrics`` of the model that is trained, row by row: totals and weights are ``[B]``,
        the same on every device.
      transforms: role -> optax transformation.
      schedules: role -> learning rate by optimizer step.
    """

    score: dict[str, Callable[[Params, PyTree], PyTree]]
    prepare: Callable[[PyTree, dict[str, PyTree]], tuple[PyTree, Metrics]]
    update: dict[str, Callable[[TrainState, PyTree], tuple[TrainState, Metrics]]]
    measure: Callable[[Params, PyTree], dict[str, Ratio]]
    transforms: dict[str, Any]
    schedules: dict[str, Callable[[int], Any]]


def make_offline_programs(plan: OfflinePlan) -> OfflinePrograms:
    """Builds the programs of a run; nothing compiles before the first call."""
    algo, hyper, rows_lie = plan.algo, plan.config.hyper, plan.train.rows
    forwards = {role: _forward(plan, role, model) for role, model in plan.models.items()}
    made = {role: make_optimizer(plan.config.optimizer, plan.updates[role]) for role in algo.TRAINS}
    summary = getattr(algo, "summary", lambda outputs, rows: outputs)

    def make_score(role: str) -> Callable[[Params, PyTree], PyTree]:
        def score(params: Params, rows: PyTree) -> PyTree:
            return _by_micro(plan, rows, lambda part: summary(forwards[role](params, part), part))

        return jax.jit(score, out_shardings=rows_lie)

    def prepare(rows: PyTree, scores: dict[str, PyTree]) -> tuple[PyTree, Metrics]:
        batch, metrics = algo.prepare(rows, scores, hyper)
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, rows_lie), batch), metrics

    def make_update(role: str) -> Callable[[TrainState, PyTree], tuple[TrainState, Metrics]]:
        def run(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
            with plan.train.active():
                return update(
                    state,
                    batch,
                    forward=forwards[role],
                    loss=lambda outputs, rows: algo.LOSSES[role](outputs, rows, hyper),
                    tx=made[role][0],
                    micro=plan.micro(batch.inputs.tokens.shape),
                )

        return jax.jit(run, donate_argnums=0)

    def measure(params: Params, batch: PyTree) -> dict[str, Ratio]:
        def of_row(outputs: PyTree, row: PyTree) -> dict[str, Ratio]:
            alone = jax.tree.map(lambda x: x[None], (outputs, row))
            value, metrics = algo.LOSSES[plan.first](*alone, hyper)
            return {"loss": value} | {name: ratio for name, ratio in metrics.items() if isinstance(ratio, Ratio)}

        forward = forwards[plan.first]
        return _by_micro(plan, batch, lambda part: jax.vmap(of_row)(forward(params, part), part))

    return OfflinePrograms(
        score={role: make_score(role) for role in algo.scored_by(hyper)},
        prepare=jax.jit(prepare),
        update={role: make_update(role) for role in algo.TRAINS},
        measure=jax.jit(measure, out_shardings=plan.train.replicated),
        transforms={role: tx for role, (tx, _) in made.items()},
        schedules={role: schedule for role, (_, schedule) in made.items()},
    )


def _forward(plan: OfflinePlan, role: str, model: Model) -> Forward:
    """The function from parameters and rows to a role's outputs: those that the algorithm reads.

    A language model gives ``Logprobs`` of the tokens that the rows' mask has, or what ``READS`` of the algorithm makes
    of its hidden states; a reward model ``TokenScores``.
    """
    hyper, chunk = plan.config.hyper, plan.config.train.vocab_chunk
    read = getattr(plan.algo, "READS", {}).get(role)
    readout = Readout(model.config.final_softcap, chunk, plan.train.row_shards)

    def lm(params: Params, rows: PyTree) -> PyTree:
        module = model.bind(params)
        hidden, _ = module(rows.inputs)
        if read is not None:
            return read(hidden, module.output_matrix(), rows, hyper, readout)
        return logprobs_from_hidden(
            hidden,
            module.output_matrix(),
            rows.inputs.tokens,
            temperature=1.0,
            softcap=readout.softcap,
            mask=rows.mask,
            capacity=rows.inputs.tokens.shape[-1],
            chunk=readout.chunk,
            row_shards=readout.row_shards,
        )

    def reward(params: Params, rows: PyTree) -> TokenScores:
        return TokenScores(model.bind(params)(rows.inputs))

    return lm if model.kind == "lm" else reward


def _by_micro(plan: OfflinePlan, rows: PyTree, function: Callable[[PyTree], PyTree]) -> PyTree:
    """What a function gives for rows, one micro-batch after another; arrays with a leading row axis."""
    with plan.train.active():
        size = rows.inputs.tokens.shape
        parts = jax.lax.map(function, split_micro(rows, plan.micro(size)))

        def whole(x: jax.Array) -> jax.Array:  # undoes split_micro
            x = jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])[: size[0]]
            return constrain(x, "rows", *[None] * (x.ndim - 1))

        return jax.tree.map(whole, parts)


def measured(plan: OfflinePlan, programs: OfflinePrograms, width: int) -> list[str]:
    """Names of what ``measure`` gives; nothing is computed.

    Args:
      plan: the run.
      programs: its programs.
      width: of the rows, see ``OfflineSource.width``.
    """
    rows = collate(plan.kind, [[]] * plan.train.row_shards, 16, width)
    roles = plan.algo.scored_by(plan.config.hyper)

    def run(params: dict[str, Params], rows: PyTree) -> dict[str, Ratio]:
        scores = {role: programs.score[role](params[role], rows) for role in roles}
        return programs.measure(params[plan.first], programs.prepare(rows, scores)[0])

    return list(jax.eval_shape(run, {role: model.abstract for role, model in plan.models.items()}, rows))
