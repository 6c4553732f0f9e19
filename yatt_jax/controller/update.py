"""One optimizer step, for every algorithm: micro-batches, one division, and no step on a number that is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from yatt_jax.parallel.pack import Micro, Packed, fold
from yatt_jax.parallel.partition import Partition, constrain
from yatt_jax.types import Max, Metrics, Params, PyTree, Ratio, TrainState

Tree = TypeVar("Tree")
Forward = Callable[[Params, Any], Any]
Loss = Callable[[Any, Any], tuple[Ratio, Metrics]]


def update(
    state: TrainState,
    batch: PyTree,
    *,
    forward: Forward,
    loss: Loss,
    tx: optax.GradientTransformation,
    micro: int = 1,
) -> tuple[TrainState, Metrics]:
    """Takes one optimizer step. Call it inside ``jax.jit``, with the state donated and the partition active.

    The gradient is ``sum(d total) / sum(weight)`` over all rows, accumulated in float32 and divided once: it is the
    same for every number of micro-batches and devices. A batch type must give rows of zeros no weight: micro-batches
    are filled up with them.

    When loss or gradient is not finite, parameters, optimizer state and step stay as they are, ``skipped`` and
    ``skipped_in_row`` grow by one, and the metrics of the step carry no data. A batch without weight (every row masked)
    changes nothing and is not counted.

    Args:
      state: what to step.
      batch: a tree of arrays with a leading row axis, or such rows in packs, which bring their micro-batches along.
      forward: ``(params, rows) -> outputs``; of packed rows it gets the ``Micro`` and gives the outputs of its rows.
      loss: ``(outputs, rows) -> (Ratio, metrics)``; sums and weights, not means. Weights must not depend on parameters.
      tx: the optimizer.
      micro: number of micro-batches of rows that are not packed.

    Returns:
      The new state, and the loss's metrics with ``loss``, ``grad_norm`` (before clipping) and ``skipped`` (0 or 1).
    """

    def total(params: Params, rows: PyTree) -> tuple[jax.Array, tuple[Ratio, Metrics]]:
        value, metrics = loss(forward(params, rows), rows.rows if isinstance(rows, Micro) else rows)
        return value.total, (value, metrics)

    def part(rows: PyTree) -> tuple[PyTree, Ratio, Metrics]:
        grads, (value, metrics) = jax.grad(total, has_aux=True)(state.params, rows)
        return jax.tree.map(lambda g: g.astype(jnp.float32), grads), value, metrics

    if isinstance(batch, Packed):
        grads, value, metrics = _accumulate_packed(part, state.params, batch)
    elif micro == 1:
        grads, value, metrics = part(batch)
    else:
        grads, value, metrics = _accumulate(part, state.params, split_micro(batch, micro))
    weight = value.weight
    grads = jax.tree.map(lambda g: g / jnp.where(weight == 0, 1.0, weight), grads)
    norm = optax.global_norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(value.mean())
    updates, opt = tx.update(grads, state.opt, state.params)
    params = optax.apply_updates(state.params, updates)
    good = finite & (weight != 0)
    state = TrainState(
        step=state.step + good,
        params=_choose(good, params, state.params),
        opt=_choose(good, opt, state.opt),
        skipped=state.skipped + ~finite,
        skipped_in_row=jnp.where(good, 0, state.skipped_in_row + ~finite),
    )
    metrics = {name: _only_if(finite, metric) for name, metric in (metrics | {"loss": value}).items()}
    metrics["grad_norm"] = _only_if(good, Ratio(norm, jnp.ones_like(norm)))
    metrics["skipped"] = Ratio((~finite).astype(jnp.float32), jnp.float32(1))
    return state, metrics


def _accumulate(
    part: Callable[[PyTree], tuple[PyTree, Ratio, Metrics]], params: Params, slices: PyTree
) -> tuple[PyTree, Ratio, Metrics]:
    """Sums ``part`` over micro-batches; one set of gradients exists beside the sum."""

    def step(so_far: PyTree, rows: PyTree) -> tuple[PyTree, tuple[Ratio, Metrics]]:
        grads, value, metrics = part(rows)
        return jax.tree.map(jnp.add, so_far, grads), (value, metrics)

    def total(ratio: Ratio) -> Ratio:
        return Ratio(jnp.sum(ratio.total), jnp.sum(ratio.weight))

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    grads, (values, metrics) = jax.lax.scan(step, zeros, slices)
    joined = {k: Max(jnp.max(m.value)) if isinstance(m, Max) else total(m) for k, m in metrics.items()}
    return grads, total(values), joined


def _accumulate_packed(
    part: Callable[[Micro], tuple[PyTree, Ratio, Metrics]], params: Params, packed: Packed
) -> tuple[PyTree, Ratio, Metrics]:
    """The same over packs. How many micro-batches there are is data: another number compiles nothing."""

    def step(rows: Micro, so_far: tuple[PyTree, Ratio, Any]) -> tuple[PyTree, Ratio, Any]:
        so_far_grads, so_far_value, so_far_metrics = so_far
        grads, value, metrics = part(rows)
        added = {name: so_far_metrics[name] + metric for name, metric in metrics.items()}
        return jax.tree.map(jnp.add, so_far_grads, grads), so_far_value + value, added

    def none(metric: Ratio | Max) -> Ratio | Max:
        return jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf if isinstance(metric, Max) else 0, x.dtype), metric)

    _, value, metrics = jax.eval_shape(lambda: part(packed.first()))
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    start = zeros, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), value), {k: none(m) for k, m in metrics.items()}
    return fold(packed, step, start)


def _choose(condition: jax.Array, new: Tree, old: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def _only_if(condition: jax.Array, metric: Ratio | Max) -> Ratio | Max:
    """The metric, or one without data."""
    if isinstance(metric, Max):
        return Max(jnp.where(condition, metric.value, -jnp.inf))
    return Ratio(jnp.where(condition, metric.total, 0.0), jnp.where(condition, metric.weight, 0.0))


def split_micro(rows: PyTree, micro: int) -> PyTree:
    """Cuts ``[B, ...]`` into ``[micro, B / micro, ...]``, rows padded with zeros to a multiple of ``micro``.

    Slice m takes the rows ``m, m + micro, ...``. Rows lie on the devices in contiguous blocks, so that every device has
    its share of every slice, no row moves (where ``micro`` divides a block), and slices do not depend on the devices.
    """

    def cut(x: jax.Array) -> jax.Array:
        missing = -x.shape[0] % micro
        x = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else x
        x = jnp.swapaxes(x.reshape(-1, micro, *x.shape[1:]), 0, 1)
        return constrain(x, None, "rows", *[None] * (x.ndim - 2))

    return jax.tree.map(cut, rows)


def state_shardings(
    abstract: Params, shardings: PyTree, tx: optax.GradientTransformation, partition: Partition
) -> TrainState:
    """The sharding of every array of a ``TrainState``: optimizer state lies as its parameters do, counters everywhere.

    Args:
      abstract: shapes and dtypes of the parameters.
      shardings: where the parameters lie, the same tree.
      tx: the optimizer.
      partition: the partition of the counters.
    """
    everywhere = partition.replicated
    opt = optax.tree.map_params(
        tx,
        lambda _, sharding: sharding,
        jax.eval_shape(tx.init, abstract),
        shardings,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(step=everywhere, params=shardings, opt=opt, skipped=everywhere, skipped_in_row=everywhere)  # pyright: ignore[reportArgumentType]


def init_state(params: Params, tx: optax.GradientTransformation, partition: Partition) -> TrainState:
    """The state before the first step; it holds the given arrays themselves, so that they are donated with it."""
    shardings = jax.tree.map(lambda x: x.sharding, params)
    where = state_shardings(params, shardings, tx, partition)
    opt = jax.jit(tx.init, out_shardings=where.opt)(params)
    zeros = jax.jit(lambda: tuple(jnp.int32(0) for _ in range(3)), out_shardings=partition.replicated)
    step, skipped, skipped_in_row = zeros()
    return TrainState(step=step, params=params, opt=opt, skipped=skipped, skipped_in_row=skipped_in_row)
