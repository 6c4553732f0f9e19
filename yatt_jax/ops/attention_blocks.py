"""Attention over packed rows block by block, without a kernel: the form for CPUs.

Online softmax with recomputation (Dao et al. 2022): blocks of queries meet blocks of keys one at a time, and a block
that no token of the other can see (later, another segment, outside the window) is never touched. Logits of one pair of
blocks exist at a time, forward and backward.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from yatt_jax.ops.attention import HIDDEN, Packed

BLOCK = 128


class _Static(NamedTuple):
    scale: float
    softcap: float
    block: int
    causal: bool


class _Rows(NamedTuple):
    """What is known of tokens, ``[B, T]``, or of one row, ``[T]``: see ``Packed``."""

    segments: jax.Array
    spans: jax.Array | None


def blocks(
    q_BTHK: Float[Array, "B T H K"],
    k_BJTK: Float[Array, "B J T K"],
    v_BJTK: Float[Array, "B J T K"],
    seen: Packed,
    *,
    window: int | Int[Array, ""],
    scale: float,
    softcap: float,
    block: int = BLOCK,
) -> Float[Array, "B T H K"]:
    """``attention.plain`` for packed rows, with the same arguments; ``block`` is the side of a block in tokens."""
    B, T, H, K = q_BTHK.shape
    J = k_BJTK.shape[1]
    pad = -T % block
    rows = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, pad))), _Rows(seen.segments, seen.spans))
    q = jnp.pad(q_BTHK, ((0, 0), (0, pad), (0, 0), (0, 0)))
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, pad), (0, 0))) for x in (k_BJTK, v_BJTK))
    N = q.shape[1] // block
    q_BNJRK = q.reshape(B, N, block, J, H // J, K).transpose(0, 1, 3, 4, 2, 5).reshape(B, N, J, -1, K)
    static = _Static(scale, softcap, block, seen.causal)
    out: Any = _attend(q_BNJRK, k, v, rows, jnp.asarray(window, jnp.int32), static)
    out = out.reshape(B, N, J, H // J, block, K).transpose(0, 1, 4, 2, 3, 5)
    return out.reshape(B, N * block, H, K)[:, :T].astype(q_BTHK.dtype)


def _block_range(rows: _Rows, window: jax.Array, s: _Static) -> tuple[Int[Array, "B N"], Int[Array, "B N"]]:
    """The first block of keys that each block of queries can see, and the one past the last; equal where none."""
    n = s.block
    index = jnp.arange(rows.segments.shape[1] // n)
    ahead = index[:, None] - index
    seen = _meet(rows.segments, n) & ((window == 0) | ((ahead - 1) * n + 1 < window))
    if s.causal:
        seen = seen & ((ahead >= 0) if rows.spans is None else (ahead >= 0) | _meet(rows.spans, n))
    some = jnp.any(seen, -1)
    first = jnp.where(some, jnp.argmax(seen, -1), index + 1)
    if s.causal and rows.spans is None:
        return first, jnp.broadcast_to(index + 1, first.shape)
    return first, jnp.where(some, len(index) - jnp.argmax(seen[:, :, ::-1], -1), index + 1)


def _meet(numbers_BT: jax.Array, n: int) -> Bool[Array, "B N N"]:
    """Which blocks of n tokens may have a number in common: ranges overlap; 0 counts for none."""
    cut = numbers_BT.reshape(numbers_BT.shape[0], -1, n)
    low, high = jnp.min(jnp.where(cut > 0, cut, jnp.iinfo(cut.dtype).max), -1), jnp.max(cut, -1)
    return (low[:, :, None] <= high[:, None, :]) & (low[:, None, :] <= high[:, :, None])


def _logits(
    q_JRK: jax.Array, k_JnK: jax.Array, row: _Rows, window: jax.Array, i: jax.Array, j: jax.Array, s: _Static
) -> tuple[jax.Array, jax.Array]:
    """Capped logits ``[J, R, n]`` of query block i and key block j, and which of them count."""
    n = s.block
    logits = jnp.einsum("jrk,jsk->jrs", q_JRK, k_JnK, preferred_element_type=jnp.float32) * s.scale
    if s.softcap:
        logits = s.softcap * jnp.tanh(logits / s.softcap)
    ahead = (i - j) * n + jnp.arange(n)[:, None] - jnp.arange(n)
    mask = _equal(row.segments, i, j, n) & ((window == 0) | (ahead < window))
    if s.causal:
        mask = mask & ((ahead >= 0) if row.spans is None else (ahead >= 0) | _equal(row.spans, i, j, n))
    return logits, jnp.tile(mask, (q_JRK.shape[1] // n, 1))


def _equal(numbers_T: jax.Array, i: jax.Array, j: jax.Array, n: int) -> Bool[Array, "n n"]:
    of_q, of_k = (jax.lax.dynamic_slice(numbers_T, (b * n,), (n,)) for b in (i, j))
    return (of_q[:, None] == of_k) & (of_q[:, None] > 0)


def _block(x_JTK: jax.Array, j: jax.Array, n: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x_JTK, j * n, n, axis=1)


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, rows: _Rows, window: jax.Array, s: _Static
) -> tuple[Float[Array, "B N J R K"], Float[Array, "B N J R"]]:
    """Outputs and the log of the softmax's denominators."""

    def row(xs: tuple[Any, ...]) -> Any:
        q_NJRK, k_JTK, v_JTK, own, first_N, upto_N = xs

        def queries(xs: tuple[jax.Array, ...]) -> Any:
            i, q_JRK, first, upto = xs

            def keys(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                top, total, out = carry
                logits, mask = _logits(q_JRK, _block(k_JTK, j, s.block), own, window, i, j, s)
                new = jnp.maximum(top, jnp.max(jnp.where(mask, logits, HIDDEN), -1))
                weights = jnp.where(mask, jnp.exp(logits - new[..., None]), 0.0)
                decay = jnp.exp(top - new)
                values = _block(v_JTK, j, s.block)
                add = jnp.einsum(
                    "jrs,jsk->jrk", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
                )
                return new, decay * total + jnp.sum(weights, -1), decay[..., None] * out + add

            start = jnp.full(q_JRK.shape[:2], HIDDEN), jnp.zeros(q_JRK.shape[:2]), jnp.zeros(q_JRK.shape, jnp.float32)
            top, total, out = jax.lax.fori_loop(first, upto, keys, start)
            some = total > 0
            total = jnp.where(some, total, 1.0)
            return out / total[..., None], jnp.where(some, top + jnp.log(total), 0.0)

        return jax.lax.map(queries, (jnp.arange(q_NJRK.shape[0]), q_NJRK, first_N, upto_N))

    return jax.lax.map(row, (q, k, v, rows, *_block_range(rows, window, s)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, rows: _Rows, window: jax.Array, s: _Static
) -> Float[Array, "B N J R K"]:
    return _forward(q, k, v, rows, window, s)[0]


def _attend_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, rows: _Rows, window: jax.Array, s: _Static
) -> tuple[jax.Array, tuple[Any, ...]]:
    out, log_total = _forward(q, k, v, rows, window, s)
    return out, (q, k, v, rows, window, out, log_total)


def _attend_backward(s: _Static, kept: tuple[Any, ...], d_out: jax.Array) -> tuple[jax.Array | None, ...]:
    q, k, v, rows, window, out, log_total = kept
    inner = jnp.sum(out * d_out, -1)
    dtype = q.dtype

    def row(xs: tuple[Any, ...]) -> Any:
        q_NJRK, k_JTK, v_JTK, own, first_N, upto_N, log_NJR, inner_NJR, d_NJRK = xs

        def queries(carry: tuple[jax.Array, jax.Array], xs: tuple[jax.Array, ...]) -> Any:
            i, q_JRK, first, upto, log_JR, inner_JR, d_JRK = xs
            d_JRK = d_JRK.astype(dtype)

            def keys(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                dq, dk, dv = carry
                keys_j, values_j = _block(k_JTK, j, s.block), _block(v_JTK, j, s.block)
                logits, mask = _logits(q_JRK, keys_j, own, window, i, j, s)
                weights = jnp.where(mask, jnp.exp(logits - log_JR[..., None]), 0.0)
                d_weights = jnp.einsum("jrk,jsk->jrs", d_JRK, values_j, preferred_element_type=jnp.float32)
                d_logits = weights * (d_weights - inner_JR[..., None]) * s.scale
                if s.softcap:
                    d_logits = d_logits * (1 - (logits / s.softcap) ** 2)
                d_logits = d_logits.astype(dtype)
                dq = dq + jnp.einsum("jrs,jsk->jrk", d_logits, keys_j, preferred_element_type=jnp.float32)
                of_k = jnp.einsum("jrs,jrk->jsk", d_logits, q_JRK, preferred_element_type=jnp.float32)
                of_v = jnp.einsum("jrs,jrk->jsk", weights.astype(dtype), d_JRK, preferred_element_type=jnp.float32)

                def add(to: jax.Array, x: jax.Array) -> jax.Array:
                    return jax.lax.dynamic_update_slice_in_dim(to, _block(to, j, s.block) + x, j * s.block, axis=1)

                return dq, add(dk, of_k), add(dv, of_v)

            dq, dk, dv = jax.lax.fori_loop(first, upto, keys, (jnp.zeros(q_JRK.shape, jnp.float32), *carry))
            return (dk, dv), dq

        zeros = jnp.zeros(k_JTK.shape, jnp.float32), jnp.zeros(v_JTK.shape, jnp.float32)
        xs = jnp.arange(q_NJRK.shape[0]), q_NJRK, first_N, upto_N, log_NJR, inner_NJR, d_NJRK
        (dk, dv), dq = jax.lax.scan(queries, zeros, xs)
        return dq.astype(dtype), dk.astype(dtype), dv.astype(dtype)

    dq, dk, dv = jax.lax.map(row, (q, k, v, rows, *_block_range(rows, window, s), log_total, inner, d_out))
    return dq, dk, dv, None, None


_attend.defvjp(_attend_forward, _attend_backward)
