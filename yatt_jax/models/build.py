"""A model as a static graph and a pure tree: built once, before any weight exists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.decoder import LanguageModel, ScalarModel
from yatt_jax.models.names import flatten, unflatten
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
      starts: the same tree with the mean and standard deviation that each parameter is drawn with.
    """

    kind: Kind
    config: DecoderConfig
    graph: Any
    abstract: Params
    axes: PyTree
    starts: PyTree

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
        """Fresh parameters, drawn straight into their sharding; the same numbers in every partition."""
        return unflatten(
            {path: self.draw(path, seed, dtype, sharding) for path, sharding in flatten(self.shardings(partition))}
        )

    def draw(self, path: str, seed: int, dtype: str, sharding: jax.sharding.Sharding) -> jax.Array:
        """One fresh parameter, by its path joined by "/".

        Drawn on the host, a layer at a time, from a generator seeded by (seed, path, layer): compiling a device's
        random bits for every shape of a model takes longer than drawing them.
        """
        shape = dict(flatten(self.abstract))[path].shape
        mean, scale = dict(flatten(self.starts))[path]
        stacked = "layers" in path.split("/")

        def layer(number: int, inner: tuple[int, ...]) -> np.ndarray:
            if scale == 0:
                return np.full(inner, mean, np.float32)
            words = np.random.SeedSequence([seed % 2**64, number, *path.encode()])
            return mean + np.float32(scale) * np.random.Generator(np.random.Philox(words)).standard_normal(
                inner, np.float32
            )

        def part(index: tuple[slice, ...]) -> np.ndarray:
            if not stacked:
                return layer(0, shape)[index].astype(jax.numpy.dtype(dtype))
            numbers = range(shape[0])[index[0]]
            return np.stack([layer(n, shape[1:])[index[1:]].astype(jax.numpy.dtype(dtype)) for n in numbers])

        return assemble(shape, sharding, part)


def assemble(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, part: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:
    """An array made of host parts; devices that hold the same part share one call.

    Args:
      shape: of the array.
      sharding: of the array.
      part: the part at a tuple of slices with explicit bounds, one per dimension.
    """
    parts: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def get(index: tuple[slice, ...] | None) -> np.ndarray:
        bounds = tuple(s.indices(size)[:2] for s, size in zip(index or (), shape, strict=True))
        if bounds not in parts:
            parts[bounds] = part(tuple(slice(*bound) for bound in bounds))
        return parts[bounds]

    return jax.make_array_from_callback(shape, sharding, get)


def build(kind: Kind, config: DecoderConfig, dtype: str = "float32", **head: Any) -> Model:
    """Builds the static half of a model without allocating anything.

    Args:
      kind: which head.
      config: sizes and switches.
      dtype: of the parameters.
      **head: for reward models, ``labels`` and ``bias`` of the head.
    """

    def make() -> nnx.Module:
        if kind == "lm":
            return LanguageModel(config)
        if kind == "value":
            return ScalarModel(config, labels=1, bias=True, head_scale=0.0)
        return ScalarModel(config, head_scale=(config.hidden + 1) ** -0.5, **({"bias": False} | head))

    graph, state = nnx.split(nnx.eval_shape(make), nnx.Param)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), nnx.to_pure_dict(state))

    def names(path: tuple[Any, ...], variable: nnx.Variable) -> tuple[str | None, ...]:
        stacked = any(getattr(part, "key", None) == "layers" for part in path)
        return (None, *variable.axes) if stacked else tuple(variable.axes)

    def tree(of: Callable[[tuple[Any, ...], nnx.Variable], Any]) -> PyTree:
        is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
        return nnx.to_pure_dict(jax.tree_util.tree_map_with_path(of, state, is_leaf=is_variable))

    return Model(kind, config, graph, abstract, tree(names), tree(lambda _, variable: variable.start))
