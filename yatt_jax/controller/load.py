"""The starting weights of each role."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax

from yatt_jax.controller.roles import FROZEN, REWARD, Plan
from yatt_jax.controller.update import init_state
from yatt_jax.io import hf
from yatt_jax.models.build import Model
from yatt_jax.report.console import Console
from yatt_jax.types import Params, PyTree, TrainState

Progress = Callable[[int], None]


def load_roles(
    plan: Plan, transforms: Mapping[str, optax.GradientTransformation], console: Console
) -> tuple[dict[str, TrainState], dict[str, Params]]:
    """Starting states of the roles that are trained, and weights of those that are not, with a progress bar each.

    Raises:
      InputError: a file that cannot be read.
    """
    states: dict[str, TrainState] = {}
    frozen: dict[str, Params] = {}
    first: Params | None = None
    for role, model in plan.models.items():
        with console.progress(f"load {role}", len(jax.tree.leaves(model.abstract))) as advance:
            params = load_weights(plan, role, first, advance)
        first = params if first is None else first
        if role in transforms:
            states[role] = init_state(params, transforms[role], plan.train)
        else:
            frozen[role] = params
    return states, frozen


def load_weights(plan: Plan, role: str, first: Params | None, progress: Progress | None = None) -> Params:
    """Reads or makes the parameters of a role, in the training partition.

    A critic or reference without a path of its own starts as a copy of the actor; the critic's value head is then zero.

    Args:
      plan: the run.
      role: of ``plan.models``: "actor", "critic", "reference", "teacher", "reward" (which is trained), or the role of a
        reward model that is not.
      first: parameters of the plan's first role, for those that start from them.
      progress: called with the number of tensors read since the last call.

    Raises:
      InputError: a file that cannot be read.
    """
    model, path = plan.models[role], plan.paths[role]
    choice = plan.config.model
    frozen = role in FROZEN or role.startswith(REWARD)
    if path:
        loaded, params = hf.load_model(
            path,
            model.kind,
            plan.train,
            dtype=choice.frozen_dtype if frozen else choice.dtype,
            compute_dtype=choice.compute_dtype,
            remat=model.config.remat,
            attention=choice.attention,
            labels=model.abstract["head"]["kernel"].shape[-1] if model.kind == "reward" and not frozen else None,
            seed=plan.config.seed,
            progress=lambda done, total, name: progress(1) if progress else None,
        )
        assert loaded.axes == model.axes
        return params
    if role == plan.first:
        return model.init(plan.config.seed, plan.train, choice.dtype)
    assert first is not None
    return from_actor(plan, model, first)


def make_copy(plan: Plan, role: str) -> Callable[[Params], Params]:
    """A program that copies the actor's weights for a frozen language model of the same sizes."""
    model = plan.models[role]

    def copy(actor: PyTree) -> Params:
        return jax.tree.map(lambda x, like: jnp.copy(x).astype(like.dtype), actor, model.abstract)

    return jax.jit(copy, out_shardings=model.shardings(plan.train))


def from_actor(plan: Plan, model: Model, actor: Params) -> Params:
    """A copy of the actor's decoder under the role's head (fresh where the actor has none such)."""
    shardings = model.shardings(plan.train)

    def copy(actor: PyTree) -> Params:
        cast = jax.tree.map(lambda x, like: jnp.copy(x).astype(like.dtype), actor["decoder"], model.abstract["decoder"])
        return {"decoder": cast}

    shared = jax.jit(copy, out_shardings={"decoder": shardings["decoder"]})(actor)
    if model.kind == "lm":
        rest = {k: jnp.copy(v).astype(model.abstract[k].dtype) for k, v in actor.items() if k != "decoder"}
        return shared | rest
    head = {name: tree for name, tree in model.abstract.items() if name != "decoder"}
    zeros = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), head),
        out_shardings={name: shardings[name] for name in head},
    )
    return shared | zeros()
