"""Functions of logits, computed for a chunk of tokens at a time, forward and backward."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from yatt_jax.parallel.partition import constrain
from yatt_jax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Readout:
    """How logits are made from hidden states.

    Attributes:
      softcap: logits become ``cap * tanh(z / cap)``; 0 is off.
      chunk: tokens whose logits exist at a time on each row shard (at least one of each row).
      row_shards: number of parts the rows are split into over devices.
    """

    softcap: float = 0.0
    chunk: int = 512
    row_shards: int = 1


def chunked(x: jax.Array, per_row: int) -> jax.Array:
    """``[B, S, ...]`` to ``[chunks, B c, ...]``, padded with zeros, with the fewest chunks of about equal size.

    Rows and their tokens become one dimension, rows first: products and their gradients are then plain matrix products.
    """
    B, S = x.shape[:2]
    count = -(-S // per_row)
    size = -(-S // count)
    x = jnp.pad(x, [(0, 0), (0, count * size - S)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(B, count, size, *x.shape[2:]), 1, 0).reshape(count, B * size, *x.shape[2:])


def joined(x: jax.Array, rows: int, size: int) -> jax.Array:
    """Undoes ``chunked``: ``[chunks, B c, ...]`` to ``[B, S, ...]``."""
    x = jnp.moveaxis(x.reshape(x.shape[0], rows, -1, *x.shape[2:]), 0, 1)
    return x.reshape(rows, -1, *x.shape[3:])[:, :size]


def map_logits(
    function: Callable[[jax.Array, PyTree, PyTree], PyTree],
    hidden: Float[Array, "*B T D"],
    matrix: Float[Array, "V D"],
    per_token: PyTree,
    constants: PyTree = None,
    *,
    readout: Readout,
) -> PyTree:
    """``function(z, per_token, constants)`` of each token's logits z, ``softcap(hidden[t - 1] . matrix)`` in float32.

    Logits exist for one chunk of tokens at a time: the derivative recomputes them. It is by ``hidden`` and ``matrix``
    alone. In bfloat16, products are taken in the dtype of ``hidden`` with float32 sums.

    Args:
      function: of ``[n, V]`` logits and the ``n`` tokens' part of ``per_token``, to arrays with a leading axis n. It
        must not hold traced values: those go into ``constants``.
      hidden: hidden states after the final norm.
      matrix: output matrix.
      per_token: arrays ``[*B, T, ...]``; value t belongs to token t.
      constants: further arrays, seen whole by every chunk.
      readout: how logits are made.

    Returns:
      What the function gives, as arrays ``[*B, T, ...]``: value t belongs to token t, 0 at t = 0.

    Raises:
      ValueError: a chunk below 1.
    """
    if readout.chunk < 1:
        raise ValueError(f"chunk = {readout.chunk}: must be at least 1")
    lead, T = hidden.shape[:-2], hidden.shape[-2]
    rows = math.prod(lead)
    flat = lambda x: x.reshape(rows, *x.shape[len(lead) :])  # noqa: E731
    before = jnp.pad(flat(hidden)[:, :-1], ((0, 0), (1, 0), (0, 0)))  # what token t is predicted from stands at t
    per_row = max(1, readout.chunk * readout.row_shards // rows)
    shards = readout.row_shards if rows % readout.row_shards == 0 else 1
    matrix = constrain(matrix.astype(hidden.dtype), "act_vocab", None)  # gathered once, and not in every chunk
    made = _map(function, per_row, shards, readout.softcap, before, matrix, jax.tree.map(flat, per_token), constants)
    return jax.tree.map(lambda x: x.at[:, 0].set(0).reshape(*lead, T, *x.shape[2:]), made)


def _logits(softcap: float, hidden: jax.Array, matrix: jax.Array) -> tuple[jax.Array, jax.Array | float]:
    """Logits of one chunk, and their derivative by raw logits."""
    z = constrain(jnp.einsum("nd,vd->nv", hidden, matrix, preferred_element_type=jnp.float32), "rows", "act_vocab")
    if not softcap:
        return z, 1.0
    bent = jnp.tanh(z / softcap)
    return softcap * bent, 1.0 - bent * bent


def _mapped(
    function: Callable[..., PyTree],
    per_row: int,
    shards: int,
    softcap: float,
    hidden_BSD: jax.Array,
    matrix_VD: jax.Array,
    per_token: PyTree,
    constants: PyTree,
) -> PyTree:
    del shards  # of interest to the derivative alone

    def one(xs: tuple[jax.Array, PyTree]) -> PyTree:
        hidden, rest = xs
        return function(_logits(softcap, hidden, matrix_VD)[0], rest, constants)

    parts = jax.tree.map(lambda x: chunked(x, per_row), (hidden_BSD, per_token))
    return jax.tree.map(lambda x: joined(x, *hidden_BSD.shape[:2]), jax.lax.map(one, parts))


def _mapped_forward(function, per_row, shards, softcap, hidden_BSD, matrix_VD, per_token, constants):
    made = _mapped(function, per_row, shards, softcap, hidden_BSD, matrix_VD, per_token, constants)
    return made, (hidden_BSD, matrix_VD, per_token, constants)


def _mapped_backward(function, per_row, shards, softcap, saved, cotangents):
    hidden_BSD, matrix_VD, per_token, constants = saved

    def one(d_matrix_RVD: jax.Array, xs: Any) -> tuple[jax.Array, jax.Array]:
        hidden, rest, given = xs
        z, slope = _logits(softcap, hidden, matrix_VD)
        _, pull = jax.vjp(lambda z: function(z, rest, constants), z)
        dz = (pull(given)[0] * slope).astype(hidden.dtype)
        d_hidden = dz @ matrix_VD
        dz, hidden = (x.reshape(shards, -1, *x.shape[1:]) for x in (dz, hidden))
        share_RVD = jnp.einsum("rnv,rnd->rvd", dz, hidden, preferred_element_type=jnp.float32)
        return constrain(d_matrix_RVD + share_RVD, "rows", "act_vocab", None), d_hidden

    parts = jax.tree.map(lambda x: chunked(x, per_row), (hidden_BSD, per_token, cotangents))
    start = constrain(jnp.zeros((shards, *matrix_VD.shape), jnp.float32), "rows", "act_vocab", None)
    d_matrix_RVD, d_hidden = jax.lax.scan(one, start, parts)
    d_matrix = jnp.sum(d_matrix_RVD, axis=0).astype(matrix_VD.dtype)
    return joined(d_hidden, *hidden_BSD.shape[:2]), d_matrix, None, None


_map = jax.custom_vjp(_mapped, nondiff_argnums=(0, 1, 2, 3))
_map.defvjp(_mapped_forward, _mapped_backward)
