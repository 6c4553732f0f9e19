"""A model as a static graph and a pure tree: built once, before any weight exists."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.decoder import LanguageModel, ScalarModel
from yatt_jax.parallel.partition import Partition, shardings
from yatt_jax.types import Params, PyTree

Kind = Literal["lm", "value", "reward"]


@dataclasses.dataclass(frozen=True)
class Model:
    """The static half of a model.

    Attributes:
      kind: "lm" (language model), "value" (critic) or "reward" (reward model).
      config: sizes and switches.
      graph: the flax.nnx graph that parameters are merged into.
      abstract: shapes and dtypes of the parameters, a nested dict.
      axes: the same tree with the logical axes of each parameter.
    """

    kind: Kind
    config: DecoderConfig
    graph: Any
    abstract: Params
    axes: PyTree

    def bind(self, params: Params) -> Any:
        """The module with these parameters (``LanguageModel`` or ``ScalarModel``), for use inside a jitted function."""
        return nnx.merge(self.graph, params)

    def shardings(self, partition: Partition) -> PyTree:
        """The sharding of every parameter in a partition."""
        return shardings(self.abstract, self.axes, partition)

    @property
    def parameter_count(self) -> int:
        """Number of scalars."""
        return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(self.abstract))

    def init(self, seed: int, partition: Partition, dtype: str = "float32") -> Params:
        """Fresh parameters, drawn straight into their sharding."""
        module = self._module

        def draw(key: jax.Array) -> Params:
            state = nnx.state(module(nnx.Rngs(params=key)), nnx.Param)
            return jax.tree.map(lambda x: x.astype(dtype), nnx.to_pure_dict(state))

        return jax.jit(draw, out_shardings=self.shardings(partition))(jax.random.key(seed))

    def _module(self, rngs: nnx.Rngs) -> nnx.Module:
        return _module(self.kind, self.config, rngs, **self.head)

    head: dict[str, Any] = dataclasses.field(default_factory=dict)


def _module(kind: Kind, config: DecoderConfig, rngs: nnx.Rngs, **head: Any) -> nnx.Module:
    if kind == "lm":
        return LanguageModel(config, rngs)
    if kind == "value":
        return ScalarModel(config, rngs, labels=1, bias=True, head_scale=0.0)
    return ScalarModel(config, rngs, head_scale=(config.hidden + 1) ** -0.5, **({"bias": False} | head))


def build(kind: Kind, config: DecoderConfig, dtype: str = "float32", **head: Any) -> Model:
    """Builds the static half of a model without allocating anything.

    Args:
      kind: which head.
      config: sizes and switches.
      dtype: of the parameters.
      **head: for reward models, ``labels`` and ``bias`` of the head.
    """
    module = nnx.eval_shape(lambda: _module(kind, config, nnx.Rngs(0), **head))
    graph, state = nnx.split(module, nnx.Param)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), nnx.to_pure_dict(state))

    def names(path: tuple[Any, ...], variable: nnx.Variable) -> tuple[str | None, ...]:
        stacked = any(getattr(part, "key", None) == "layers" for part in path)
        return (None, *variable.axes) if stacked else tuple(variable.axes)

    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    axes = nnx.to_pure_dict(jax.tree_util.tree_map_with_path(names, state, is_leaf=is_variable))
    return Model(kind, config, graph, abstract, axes, head)
