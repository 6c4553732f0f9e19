"""Name tables: how tensors of a Hugging Face checkpoint map to a parameter tree, in both directions.

A table row names the Hugging Face tensor, our path, and the layout, written like
``"(h k) d -> d h k"``: Hugging Face on the left, ours on the right, merged dimensions in brackets. Import, export and
reading by slices all follow from that one line, so they are inverse by construction.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from yatt_jax.models.config import DecoderConfig
from yatt_jax.types import Params

Slices = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A rearrangement between a Hugging Face tensor and ours.

    Attributes:
      groups: for each Hugging Face dimension, the dimensions of ours that it merges, in row-major order.
    """

    groups: tuple[tuple[int, ...], ...]

    @staticmethod
    def parse(pattern: str) -> Layout:
        """Reads ``"(h k) d -> d h k"``."""
        left, right = pattern.split("->")
        ours = right.split()
        groups = [part.strip("()").split() for part in re.findall(r"\([^)]*\)|\w+", left)]
        if sorted(name for group in groups for name in group) != sorted(ours):
            raise ValueError(f"layout {pattern!r}: both sides must name the same dimensions")
        return Layout(tuple(tuple(ours.index(name) for name in group) for group in groups))

    @property
    def order(self) -> tuple[int, ...]:
        """Our dimensions in the order Hugging Face stores them."""
        return tuple(dim for group in self.groups for dim in group)

    def hf_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The Hugging Face shape of a tensor of ours."""
        return tuple(math.prod(shape[dim] for dim in group) for group in self.groups)

    def hf_slices(self, slices: Slices, shape: Sequence[int]) -> Slices:
        """The part of the Hugging Face tensor that a part of ours lies in.

        Only the first dimension of a merged group may be cut, which keeps the part contiguous.
        """
        result = []
        for group in self.groups:
            first, rest = group[0], group[1:]
            if any(slices[dim] != slice(0, shape[dim]) for dim in rest):
                raise ValueError(f"dimensions {rest} of a merged group cannot be cut")
            inner = math.prod(shape[dim] for dim in rest)
            result.append(slice(slices[first].start * inner, slices[first].stop * inner))
        return tuple(result)

    def from_hf(self, tensor: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Rearranges a Hugging Face tensor, or a part of one, into our ``shape``."""
        split = tensor.reshape([shape[dim] for dim in self.order])
        return split.transpose(np.argsort(self.order))

    def to_hf(self, tensor: np.ndarray) -> np.ndarray:
        """The inverse of ``from_hf``."""
        return tensor.transpose(self.order).reshape(self.hf_shape(tensor.shape))


@dataclasses.dataclass(frozen=True)
class Name:
    """One row of a name table.

    Attributes:
      hf: Hugging Face name; ``{layer}`` stands for the layer number of stacked tensors.
      path: our path, joined by "/".
      layout: see ``Layout.parse``.
      also: further names under which checkpoints are known to carry the tensor.
    """

    hf: str
    path: str
    layout: str
    also: tuple[str, ...] = ()

    @property
    def stacked(self) -> bool:
        """Whether there is one such tensor a layer."""
        return "{layer}" in self.hf


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
      model_type: as in config.json.
      architectures: transformers class of a language model ("lm"), critic ("value") and reward model ("reward").
      from_hf: the decoder that a config.json describes; raises ``ConfigError`` naming the key it cannot follow.
      to_hf: the config.json of a decoder.
      names: the name table.
      not_stock: kinds of model that transformers has no class for; their folders are read here alone.
      unread: beginnings of names of tensors that belong to other models in the same folder.
    """

    model_type: str
    architectures: Mapping[str, str]
    from_hf: Callable[[Mapping[str, Any]], DecoderConfig]
    to_hf: Callable[[DecoderConfig], dict[str, Any]]
    names: tuple[Name, ...]
    not_stock: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter of a model, with the checkpoint tensors that it is made of.

    Attributes:
      path: ours, joined by "/".
      shape: ours; the first dimension is the layer where ``stacked``.
      stacked: whether there is one checkpoint tensor a layer.
      layout: of one checkpoint tensor.
      names: checkpoint tensors, one a layer or one in all; each a tuple of the names it may go by.
    """

    path: str
    shape: tuple[int, ...]
    stacked: bool
    layout: Layout
    names: tuple[tuple[str, ...], ...]

    @property
    def inner(self) -> tuple[int, ...]:
        """Our shape of one checkpoint tensor."""
        return self.shape[1:] if self.stacked else self.shape


def flatten(tree: Params, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a nested dict with their paths joined by "/"."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from flatten(value, f"{path}/")
        elif value is not None:
            yield path, value


def unflatten(leaves: dict[str, Any]) -> Params:
    """The nested dict of ``flatten``."""
    tree: Params = {}
    for path, value in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def leaves_of(table: Sequence[Name], abstract: Params) -> list[Leaf]:
    """Pairs every parameter of a model with its checkpoint tensors; rows that the model has no use for are skipped.

    Raises:
      ValueError: a parameter that the table does not name.
    """
    rows = {row.path: row for row in table}
    result = []
    for path, leaf in flatten(abstract):
        row = rows.get(path)
        if row is None:
            raise ValueError(f"the family's name table has no row for the parameter {path}: it cannot hold this model")
        shape = tuple(leaf.shape)
        spellings = (row.hf, *row.also)
        count = shape[0] if row.stacked else 1
        names = tuple(tuple(name.format(layer=layer) for name in spellings) for layer in range(count))
        result.append(Leaf(path, shape, row.stacked, Layout.parse(row.layout), names))
    return result


def under(rows: Sequence[Name], prefix: str, first: str, *others: str) -> tuple[Name, ...]:
    """Rows with another beginning of their names; those that begin otherwise stay.

    Args:
      rows: of a table.
      prefix: what is taken off.
      first: what is written in its place.
      others: what else checkpoints are known to have there.
    """

    def moved(row: Name) -> Name:
        if not row.hf.startswith(prefix):
            return row
        names = [start + name.removeprefix(prefix) for name in (row.hf, *row.also) for start in (first, *others)]
        return dataclasses.replace(row, hf=names[0], also=tuple(names[1:]))

    return tuple(moved(row) for row in rows)


_LAYER = "model.layers.{layer}."
_BLOCK = "decoder/layers/"

# What the Llama lineage shares. Rows for switches that are off in a model (biases, a head of its own) lie unused.
TRANSFORMER = (
    Name("model.embed_tokens.weight", "decoder/embedding", "v d -> v d"),
    Name(_LAYER + "input_layernorm.weight", _BLOCK + "attention_norm/scale", "d -> d"),
    Name(_LAYER + "self_attn.q_proj.weight", _BLOCK + "attention/q/kernel", "(h k) d -> d h k"),
    Name(_LAYER + "self_attn.k_proj.weight", _BLOCK + "attention/k/kernel", "(j k) d -> d j k"),
    Name(_LAYER + "self_attn.v_proj.weight", _BLOCK + "attention/v/kernel", "(j k) d -> d j k"),
    Name(_LAYER + "self_attn.o_proj.weight", _BLOCK + "attention/o/kernel", "d (h k) -> h k d"),
    Name(_LAYER + "mlp.gate_proj.weight", _BLOCK + "mlp/gate/kernel", "f d -> d f"),
    Name(_LAYER + "mlp.up_proj.weight", _BLOCK + "mlp/up/kernel", "f d -> d f"),
    Name(_LAYER + "mlp.down_proj.weight", _BLOCK + "mlp/down/kernel", "d f -> f d"),
    Name("model.norm.weight", "decoder/norm/scale", "d -> d"),
)
MLP_NORM = (Name(_LAYER + "post_attention_layernorm.weight", _BLOCK + "mlp_norm/scale", "d -> d"),)
SANDWICH_NORMS = (
    Name(_LAYER + "post_attention_layernorm.weight", _BLOCK + "post_attention_norm/scale", "d -> d"),
    Name(_LAYER + "pre_feedforward_layernorm.weight", _BLOCK + "mlp_norm/scale", "d -> d"),
    Name(_LAYER + "post_feedforward_layernorm.weight", _BLOCK + "post_mlp_norm/scale", "d -> d"),
)
QKV_BIAS = (
    Name(_LAYER + "self_attn.q_proj.bias", _BLOCK + "attention/q/bias", "(h k) -> h k"),
    Name(_LAYER + "self_attn.k_proj.bias", _BLOCK + "attention/k/bias", "(j k) -> j k"),
    Name(_LAYER + "self_attn.v_proj.bias", _BLOCK + "attention/v/bias", "(j k) -> j k"),
)
OUT_BIAS = (Name(_LAYER + "self_attn.o_proj.bias", _BLOCK + "attention/o/bias", "d -> d"),)
MLP_BIAS = (
    Name(_LAYER + "mlp.gate_proj.bias", _BLOCK + "mlp/gate/bias", "f -> f"),
    Name(_LAYER + "mlp.up_proj.bias", _BLOCK + "mlp/up/bias", "f -> f"),
    Name(_LAYER + "mlp.down_proj.bias", _BLOCK + "mlp/down/bias", "d -> d"),
)
QK_NORM = (
    Name(_LAYER + "self_attn.q_norm.weight", _BLOCK + "attention/q_norm/scale", "k -> k"),
    Name(_LAYER + "self_attn.k_norm.weight", _BLOCK + "attention/k_norm/scale", "k -> k"),
)
# Heads: language model; sequence and token classification (some classes call it classifier).
HEADS = (
    Name("lm_head.weight", "unembedding", "v d -> v d"),
    Name("score.weight", "head/kernel", "y d -> d y", also=("classifier.weight",)),
    Name("score.bias", "head/bias", "y -> y", also=("classifier.bias",)),
)
