"""How far a student's distribution is from its teacher's: over the whole vocabulary, or the teacher's K largest."""

from __future__ import annotations

import functools
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from yatt_jax.ops.chunks import Readout, map_logits
from yatt_jax.ops.preference import log1mexp
from yatt_jax.types import Divergences, LogitsAt, TopK

# forward: KL(teacher || student), which covers all that the teacher says; reverse: KL(student || teacher), which avoids
# what it does not say.
Direction: TypeAlias = Literal["forward", "reverse"]
# What becomes of the rest of the vocabulary: left out, both distributions being made to sum to 1 over the K entries; or
# one further entry with all of its probability.
Rest: TypeAlias = Literal["left_out", "one_entry"]


def divergence(log_p: Float[Array, "*B V"], log_q: Float[Array, "*B V"], direction: Direction) -> Float[Array, "*B"]:
    """``KL(p || q) = sum p (log p - log q)`` forward, with the teacher p; ``KL(q || p)`` in reverse."""
    first, second = (log_p, log_q) if direction == "forward" else (log_q, log_p)
    return jnp.sum(jnp.exp(first) * (first - second), axis=-1)


def topk_divergence(
    student: LogitsAt,
    teacher: Float[Array, "*B T K"],
    teacher_log_sum_exp: Float[Array, "*B T"],
    *,
    direction: Direction,
    rest: Rest,
    temperature: float,
) -> Float[Array, "*B T"]:
    """Divergence of a student from a teacher of which K logits are known, in nats, times the squared temperature.

    The factor keeps the size of the gradient (Hinton et al. 2015, "Distilling the knowledge in a neural network").

    Args:
      student: its logits of the same K entries.
      teacher: the teacher's logits.
      teacher_log_sum_exp: over the whole vocabulary; read where the rest is one entry.
      direction: of the divergence.
      rest: what becomes of the rest of the vocabulary.
      temperature: divides the logits of both; 1 where the rest is one entry.
    """
    if rest == "left_out":
        p, q = (jax.nn.log_softmax(x / temperature) for x in (teacher, student.logits))
        return temperature**2 * divergence(p, q, direction)
    p = _with_rest(teacher - teacher_log_sum_exp[..., None])
    q = _with_rest(student.logits - student.log_sum_exp[..., None])
    return divergence(p, q, direction)


def _with_rest(logprobs: Float[Array, "*B K"]) -> Float[Array, "*B K1"]:
    """The log-probabilities, and that of everything else."""
    total = jax.nn.logsumexp(logprobs, axis=-1, keepdims=True)
    return jnp.concatenate([logprobs, log1mexp(total)], axis=-1)


def logits_at(
    hidden: Float[Array, "*B T D"],
    matrix: Float[Array, "V D"],
    ids: Int[Array, "*B T K"],
    tokens: Int[Array, "*B T"],
    readout: Readout,
) -> LogitsAt:
    """Logits of given entries at each token, with a derivative, and never the logits of all tokens; see ``map_logits``.

    Args:
      hidden: hidden states after the final norm.
      matrix: output matrix.
      ids: the entries, for token t at t.
      tokens: the tokens themselves.
      readout: how logits are made.
    """
    return map_logits(_at, hidden, matrix, (ids, tokens), readout=readout)


def _at(z: jax.Array, per_token: tuple[jax.Array, jax.Array], _: None) -> LogitsAt:
    ids, tokens = per_token
    log_sum_exp = jax.nn.logsumexp(z, axis=-1)
    found = jnp.take_along_axis(z, jnp.concatenate([ids, tokens[:, None]], axis=-1), axis=-1)
    return LogitsAt(found[:, :-1], log_sum_exp, found[:, -1] - log_sum_exp)


def largest_logits(
    hidden: Float[Array, "*B T D"], matrix: Float[Array, "V D"], k: int, readout: Readout
) -> tuple[TopK, Float[Array, "*B T"]]:
    """A teacher's K largest logits at each token, and its log-sum-exp over the whole vocabulary; no derivative."""
    return map_logits(functools.partial(_largest, k), hidden, matrix, (), readout=readout)


def _largest(k: int, z: jax.Array, *_: object) -> tuple[TopK, jax.Array]:
    return TopK(*jax.lax.top_k(z, k)), jax.nn.logsumexp(z, axis=-1)


def full_divergence(
    hidden: Float[Array, "*B T D"],
    matrix: Float[Array, "V D"],
    teacher_hidden: Float[Array, "*B T E"],
    teacher_matrix: Float[Array, "V E"],
    tokens: Int[Array, "*B T"],
    *,
    direction: Direction,
    temperature: float,
    readout: Readout,
    teacher_softcap: float,
) -> Divergences:
    """Divergence from a teacher over the whole vocabulary, in nats, times the squared temperature; see ``map_logits``.

    Args:
      hidden: the student's hidden states after the final norm.
      matrix: its output matrix.
      teacher_hidden: the teacher's hidden states, of its own size; a constant.
      teacher_matrix: its output matrix over the same vocabulary; a constant.
      tokens: the tokens themselves.
      direction: of the divergence.
      temperature: divides the logits of both; log-probabilities of tokens are at temperature 1.
      readout: how logits are made.
      teacher_softcap: soft cap of the teacher's logits; 0 is off.
    """
    before = jnp.pad(teacher_hidden[..., :-1, :], [(0, 0)] * (tokens.ndim - 1) + [(1, 0), (0, 0)])
    function = functools.partial(_from_teacher, direction, temperature, teacher_softcap)
    constant = teacher_matrix.astype(teacher_hidden.dtype)
    return map_logits(function, hidden, matrix, (before, tokens), constant, readout=readout)


def _from_teacher(
    direction: Direction,
    temperature: float,
    softcap: float,
    z: jax.Array,
    per_token: tuple[jax.Array, jax.Array],
    matrix: jax.Array,
) -> Divergences:
    hidden, tokens = per_token
    teacher = jnp.einsum("nd,vd->nv", hidden, matrix, preferred_element_type=jnp.float32)
    teacher = softcap * jnp.tanh(teacher / softcap) if softcap else teacher
    p, q = (jax.nn.log_softmax(x / temperature) for x in (teacher, z))
    at_token = jnp.take_along_axis(z, tokens[:, None], axis=-1)[:, 0]
    apart = temperature**2 * divergence(p, q, direction)
    return Divergences(apart, at_token - jax.nn.logsumexp(z, axis=-1))
